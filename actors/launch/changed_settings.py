"""Reports settings and user code that differ from an earlier start; a difference may be intended."""

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from rstar_ray.config import RunConfig, leaves, may_change, own_rules
from rstar_ray.config.options import spelled
from rstar_ray.evaluation.request_digest import own_code
from rstar_ray.run_dir.folder import RunDir, flatten

ASKED = ("chat.", "rollout.instruct", "tools.", "reward.")
"""Prefixes of the settings that affect the prompt, the replies to calls, and the reward."""
MAX_CHARS = 200
"""Longest value that a message shows."""


def different_settings(model: Path, now: Any, *, but: Collection[str] = ()) -> list[str]:
    """One message, with the option, per setting in `ASKED` that differs from the stage that wrote `model`.

    `now`: a tree with some of a run's settings; `but`: settings to ignore. Empty for a folder that no run wrote, or
    that was copied out of its run directory.
    """
    made = stage_of(model)
    if made is None:
        return []
    run_dir, stage = made
    then = flatten(run_dir.configs().get(stage, {}))
    there = {name: tuple(cast(list[Any], value)) if isinstance(value, list) else value for name, value in then.items()}
    skipped = {*but, *may_change(now)}
    lines: list[str] = []
    for name, ours in leaves(now).items():
        if name.startswith(ASKED) and name not in skipped and there.get(name, ours) != ours:
            option = spelled(name, there[name])
            if len(option) > MAX_CHARS:
                option = f"{option.partition(' ')[0]} as {run_dir.config_path} has it"
            lines.append(
                f"this differs from {stage} of {run_dir.path}, with {spelled(name, ours)[:MAX_CHARS]}; "
                f"for the same give {option}"
            )
    return lines


def rule_digests(config: RunConfig) -> dict[str, str]:
    """Digests of the modules that hold the user's rules of the algorithm."""
    folder = Path(config.own_folder).absolute()
    return own_code(own_rules(config.algorithm), folder, sys.path)


def changed_rules(run_dir: RunDir, config: RunConfig) -> list[str]:
    """One line if modules of the user's rules have changed since this stage was last started, otherwise none."""
    before: dict[str, str] = next(
        (row["rules"] for row in reversed(run_dir.launches(config.stage)) if "rules" in row), {}
    )
    now = rule_digests(config)
    changed = sorted(module for module in before if module in now and now[module] != before[module])
    named = ", ".join(own_rules(config.algorithm))
    return [f"{named}: {', '.join(changed)} changed since {config.stage} was last started"] if changed else []


def stage_of(model: Path) -> tuple[RunDir, str] | None:
    """The run directory and the stage that wrote a policy's folder; None if no run wrote it."""
    folder = model.absolute()
    stage, step, _ = folder.parent.name.rpartition("-step-")
    if folder.name != "model" or not step or folder.parents[1].name != "checkpoints":
        return None
    run_dir = RunDir(folder.parents[2])
    return (run_dir, stage) if run_dir.config_path.is_file() else None
