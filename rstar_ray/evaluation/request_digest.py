"""A digest of everything that the rollouts of an evaluation depend on: rows under another digest are not reused.

A setting that names a file counts by the file's contents: an edited template or function gives another digest.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path

from rstar_ray.chat.protocol import with_protocol
from rstar_ray.config import RunConfig, leaves, may_change, own_agent, own_environments, own_rewards, same_answers
from rstar_ray.tools.spec import ToolSpec


def request_digest(config: RunConfig, plugins: Mapping[str, object], model: Path | None) -> str:
    """Everything that may change the rollouts of a problem, or their rewards.

    `plugins` is the result of `plugin_digest`; `model` is a folder whose policy is not of the run.
    """
    alike = may_change(config) | same_answers(config)
    asked: dict[str, object] = {name: value for name, value in leaves(config).items() if name not in alike}
    asked["weights"] = None if model is None else [str(model.absolute()), *_weights(model)]
    return digest_of({**asked, **plugins})


def plugin_digest(config: RunConfig, tools: Sequence[ToolSpec]) -> dict[str, object]:
    """Digests of the files that settings name: custom code, tool specifications, chat template.

    Taken when a command starts, because that is when they are read. The keys are part of the digests of earlier
    runs.
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


OURS = Path(__file__).resolve().parents[1]
"""This package: what it computes is not part of what a person changed."""


def own_code(entries: Sequence[str], folder: Path, elsewhere: Sequence[str] = ()) -> dict[str, str]:
    """Digests by module, of those that `module:object` entries name and of what they import from `folder`.

    A named module that is not in `folder` is looked for in the folders `elsewhere`, and what it imports is left alone.
    """
    found: dict[str, str] = {}
    waiting = [(entry.partition(":")[0], [str(folder), *elsewhere]) for entry in entries]
    while waiting:
        module, places = waiting.pop()
        path = module_file(module, places)
        if module in found or path is None or OURS in path.resolve().parents:
            continue
        source = path.read_bytes()
        found[module] = hashlib.blake2b(source, digest_size=8).hexdigest()
        if folder in path.parents:
            waiting += [(name, [str(folder)]) for name in _imported(source, module, path.name == "__init__.py")]
    return found


def module_file(module: str, places: Sequence[str]) -> Path | None:
    """The file that holds a module, with a package's own being its `__init__.py`; None where there is none."""
    inside, file = list(places), None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, inside)
        if spec is None:
            return None
        inside, file = list(spec.submodule_search_locations or ()), spec.origin
    return Path(file).absolute() if file else None


def _imported(source: bytes, module: str, is_package: bool) -> Iterator[str]:
    """Names that may be modules; of `from a import b` both `a` and `a.b`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # it cannot be imported either, and is refused for that
        return
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names for name in _with_parents(alias.name))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            for name in (start, *(f"{start}.{alias.name}".lstrip(".") for alias in node.names)):
                yield from _with_parents(name)


def _with_parents(module: str) -> Iterator[str]:
    """`a.b.c` runs `a` and `a.b` first."""
    parts = module.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)) if parts[0])
