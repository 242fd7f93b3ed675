"""Parses a command line into checked settings; `--help` shows every field with its unit and default."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors.launch.ray_connection import connect
from rstar_ray.config import Condition, RunConfig, differences, idle, with_values
from rstar_ray.config.options import HELP, given, options_of, spelled, split_config_file, with_config_file
from rstar_ray.config.protocols import PROTOCOLS
from rstar_ray.config.recipe import Recipe
from rstar_ray.config.scales import SCALES, at_scale, detect_scale, local_resources
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.sinks import EXTERNAL
from rstar_ray.stages import STAGES

INSTEAD: dict[str, dict[str, str]] = {
    "sft": {
        "--steps": "--sft.steps",
        "--prompts-per-step": "--sft.batch-size",
        "--optimizer.learning-rate": "--sft.learning-rate",
        "--optimizer.warmup-steps": "--sft.warmup-share",
        "--data.train": "--sft.data",
    },
    "evaluate": {
        "--rollout.max-response-tokens": "--evaluate.max-response-tokens",
        "--rollout.max-turns": "--evaluate.max-turns",
        "--rollout.temperature": "--evaluate.temperature",
        "--rollout.top-p": "--evaluate.top-p",
        "--data.train": "--evaluate.files",
    },
}
"""By stage: options of other stages that have no effect in it, and the option to use instead."""

OF_TRAINING = ("--stage", "--model", *(f"--telemetry.{sink}" for sink in EXTERNAL))
"""Options in a stage's settings file that an evaluation ignores."""

log = logging.getLogger(__name__)


def parse(recipes: Sequence[Recipe], argv: Sequence[str]) -> list[RunConfig]:
    """The settings of each stage: its defaults, overridden by the command line's options.

    `--model` is the policy that the first stage starts from; the others start from the previous stage. Raises
    `ConfigError`.
    """
    of_file, own = split_config_file(argv)
    scales = [chosen("--scale", words, ("auto", *SCALES), "auto") for words in (of_file, own)]
    if "auto" not in scales and scales[0] != scales[1]:
        raise ConfigError("--scale", "differs from the scale in the file of --config", "remove one of the two")
    of_stage = [recipe.paper.stage for recipe in recipes] == ["evaluate"] and _stage_of(of_file) in STAGES
    if of_stage:  # the file has a training stage's settings: its --model is not the policy to evaluate
        of_file = [word for word in of_file if word.partition("=")[0] not in OF_TRAINING]
    scale = _scale([*of_file, *own])
    defaults = [at_scale(recipe.paper, scale, recipe.tiny) for recipe in recipes]
    if len(recipes) > 1 and _stage_of(of_file):
        defaults, of_file = _with_stage_file(defaults, of_file), []
    argv = [*of_file, *own]
    protocol = _options(PROTOCOLS[chosen("--evaluate.protocol", argv, tuple(PROTOCOLS), "own")])
    # The last of two equal options wins, so a protocol's options come before those of the source that chose it.
    words = [*of_file, *protocol, *own] if "--evaluate.protocol" in given(own) else [*protocol, *argv]
    if HELP & set(argv):
        _parse_one(_shown(defaults), words)  # exits
    configs: list[RunConfig] = []
    for default in defaults:
        parsed = _parse_one(default, words)
        if parsed.stage != default.stage:
            hint = f"run recipes/{parsed.stage}.py" if parsed.stage in (*STAGES, "evaluate") else "leave it out"
            raise ConfigError("--stage", f"this recipe runs {default.stage}", hint)
        values: dict[str, Any] = {"scale": scale, **({"model": ""} if configs else {})}
        configs.append(with_values(parsed, values))
    asked = own if of_stage else argv
    if len(recipes) == 1:
        _refuse_other_stages(recipes[0].stage, asked)
    for line in idle_lines(configs, asked):
        log.info(line)
    return configs


def _with_stage_file(defaults: Sequence[RunConfig], of_file: Sequence[str]) -> list[RunConfig]:
    """Apply one stage's settings file to the defaults of several stages: what it changes in its stage's defaults
    applies to all of them. Raises `ConfigError` if its stage is not among them.
    """
    stage = _stage_of(of_file)
    own = next((default for default in defaults if default.stage == stage), None)
    if own is None:
        stages = ", ".join(default.stage for default in defaults)
        raise ConfigError("--config", f"its stage is not one of this recipe (got {stage})", f"give a file of {stages}")
    changed = differences(_parse_one(own, of_file), own)
    return [with_values(default, changed) for default in defaults]


def config_in(file: str) -> RunConfig:
    """The settings in the file of --run-config; missing fields have the defaults of its scale."""
    try:
        words = with_config_file(["--config", file])
    except ConfigError as unreadable:
        raise ConfigError("--run-config", unreadable.problem, unreadable.hint) from None
    return _parse_one(at_scale(RunConfig(), _scale(words), {}), words)


def _stage_of(words: Sequence[str]) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith("--stage=")), "")


def _shown(defaults: Sequence[RunConfig]) -> RunConfig:
    """The defaults that `--help` shows: the first RL stage's, with the SFT settings of the first stage."""
    return replace(defaults[min(1, len(defaults) - 1)], sft=defaults[0].sft)


def _options(values: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def _refuse_other_stages(stage: str, argv: Sequence[str]) -> None:
    """Raise `ConfigError` for an option in `INSTEAD`, unless the option to use instead is given too."""
    asked = given(argv)
    for option, meant in INSTEAD.get(stage, {}).items():
        if option in asked and meant not in asked:
            raise ConfigError(option, f"has no effect in {stage}", f"give {meant}")


def idle_lines(configs: Sequence[RunConfig], argv: Sequence[str]) -> list[str]:
    """One warning per given option that has no effect in any of these stages.

    Raises `ConfigError` for an option that is not `warn_only`.
    """
    asked, in_each = given(argv), [idle(config) for config in configs]
    lines: list[str] = []
    for name in in_each[0]:
        option = next((way for way in (spelled(name), spelled(name, False)) if way in asked), "")
        if not option or not all(name in lacking for lacking in in_each):
            continue
        refused = [
            one for one in zip(configs, in_each, strict=True) if not any(lack.warn_only for lack in one[1][name])
        ]
        if refused:
            config, lacking = refused[0]
            lack = lacking[name][0]
            raise ConfigError(option, lack.problem(config), lack.hint)
        if not _sft_may_come_first(configs, in_each[0][name]):
            lack = next(lack for lack in in_each[0][name] if lack.warn_only)
            lines.append(f"{option} {lack.problem(configs[0])}")
    return lines


def _sft_may_come_first(configs: Sequence[RunConfig], lacking: Sequence[Condition]) -> bool:
    """Whether SFT may run first, as at scale tiny without a policy, and would use the option."""
    first = configs[0]
    before = replace(first, stage="sft")
    return first.scale == "tiny" and first.stage in STAGES[1:] and all(lack.holds(before) for lack in lacking)


def _scale(argv: Sequence[str]) -> str:
    asked = chosen("--scale", argv, ("auto", *SCALES), "auto")
    if asked != "auto":
        return asked
    resources = _cluster_resources() if os.environ.get("RAY_ADDRESS") else local_resources()
    scale, reason = detect_scale(resources)
    if not HELP & set(argv):
        log.info(f"scale: {scale} ({reason})")
    return scale


def chosen(option: str, argv: Sequence[str], choices: Sequence[str], default: str) -> str:
    """The value of an option that other settings' defaults depend on."""
    value = default
    for position, word in enumerate(argv):
        name, equals, written = word.partition("=")
        if name == option:
            value = written if equals else next(iter(argv[position + 1 :]), "")
            if not value or value.startswith("--"):
                raise ConfigError(option, "needs a value", f"choose {', '.join(choices)}")
    if value not in choices:
        raise ConfigError(
            option, f"{value!r} is not a {option.strip('-').rpartition('.')[2]}", f"choose {', '.join(choices)}"
        )
    return value


def _cluster_resources() -> dict[str, float]:
    import ray

    connect()
    return {name: float(amount) for name, amount in ray.cluster_resources().items()}


def _parse_one(default: RunConfig, argv: Sequence[str]) -> RunConfig:
    return options_of(RunConfig, argv, default=default, description=sys.modules["__main__"].__doc__)
