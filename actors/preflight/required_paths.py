"""Paths that a run's actors read on any node: made absolute, and required to hold the same as on the driver."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rstar_ray.config import RunConfig, own_agent, own_environments, own_rewards, own_rules, with_values
from rstar_ray.telemetry.traces import is_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """One path that every node must have."""

    option: str
    path: Path
    holds: Literal["model", "file", "code"]
    entries: tuple[str, ...] = ()  # for code: the `module:object` names that settings refer to


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make paths absolute, because Ray starts processes in other folders."""
    traces = config.telemetry.traces
    named = {
        "own_folder": config.own_folder or ".",
        "telemetry.traces": "" if is_address(traces) else traces,
        "chat.template": config.chat.template,
        "chat.tool_schema": config.chat.tool_schema,
        "algorithm.reference_model": config.algorithm.reference_model,
    }
    return with_values(config, {name: str(_absolute(path)) for name, path in named.items() if path})


def needed_paths(config: RunConfig, model: Path) -> list[Needed]:
    """Paths that the run reads outside its run directory; problem files are excluded, only the driver reads them."""
    needed = [Needed(option="--model", path=_absolute(model), holds="model")]
    if reference := config.algorithm.reference_model:
        needed.append(Needed(option="--algorithm.reference-model", path=_absolute(reference), holds="model"))
    if template := config.chat.template:
        needed.append(Needed(option="--chat.template", path=_absolute(template), holds="file"))
    if schema := config.chat.tool_schema:
        needed.append(Needed(option="--chat.tool-schema", path=_absolute(schema), holds="file"))
    named = (
        *own_rewards(config.reward),
        *own_rules(config.algorithm),
        *own_environments(config.tools),
        *own_agent(config.agent),
        *config.tools.use,
    )
    if own := tuple(entry for entry in named if ":" in entry):
        needed.append(Needed(option="--own-folder", path=_absolute(config.own_folder), holds="code", entries=own))
    return needed


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
