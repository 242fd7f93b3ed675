"""A digest of everything that the rollouts of an evaluation depend on: rows under another digest are not reused.

A setting that names a file counts by the file's contents: an edited template or function gives another digest.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rstar_ray.chat.protocol import with_protocol
from rstar_ray.config import RunConfig, leaves, may_change, own_agent, own_environments, own_rewards, same_answers
from rstar_ray.evaluation.own_code_digest import own_code
from rstar_ray.tools.spec import ToolSpec


def request_digest(config: RunConfig, plugins: Mapping[str, object], model: Path | None) -> str:
    """Of all that may change the rollouts of a problem, or their rewards.

    `plugins` is what `plugin_digest` returned; `model` is a folder whose policy is not of the run.
    """
    alike = may_change(config) | same_answers(config)
    asked: dict[str, object] = {name: value for name, value in leaves(config).items() if name not in alike}
    asked["weights"] = None if model is None else [str(model.absolute()), *_weights(model)]
    return digest_of({**asked, **plugins})


def plugin_digest(config: RunConfig, tools: Sequence[ToolSpec]) -> dict[str, object]:
    """Contents behind the names in the settings: custom code, tool specifications, chat template.

    Taken when a command starts, because they are read then. The keys are part of the digests of earlier runs.
    """
    chat = with_protocol(config.chat)
    named = (*own_rewards(config.reward), *own_environments(config.tools), *own_agent(config.agent), *config.tools.use)
    entries = [entry for entry in named if ":" in entry]
    return {
        "own code": own_code(entries, Path(config.own_folder).absolute(), sys.path),
        "told tools": [asdict(tool) for tool in tools],
        "template": _contents(chat.template),
        "tool schema": _contents(chat.tool_schema),
    }


def _contents(path: str) -> str:
    return hashlib.blake2b(Path(path).expanduser().read_bytes()).hexdigest() if path else ""


def digest_of(asked: Mapping[str, object]) -> str:
    """12 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(asked, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()


def _weights(model: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of the folder's files: other weights under the same path are another policy."""
    stats = [(path.name, path.stat()) for path in sorted(model.iterdir()) if path.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
