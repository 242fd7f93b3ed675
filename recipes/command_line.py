"""From a command line to checked settings: `--help` shows every field with its unit and default."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from recipes.connect import connect
from recipes.protocols import PROTOCOLS
from recipes.recipe import Recipe
from recipes.scales import SCALES, at_scale, detect_scale, local_resources
from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.options import options_of
from rstar_ray.errors import ConfigError


def parse(recipes: Sequence[Recipe], argv: Sequence[str], *, show: Callable[[str], None] = print) -> list[RunConfig]:
    """The settings of each stage: its own, with the command line's options over them.

    `--model` is the policy the first stage starts from; the others start from the stage before. Raises `ConfigError`
    in one line that names the option and the mend.
    """
    scale = _scale(argv, show)
    protocol = PROTOCOLS[_chosen("--evaluate.protocol", argv, tuple(PROTOCOLS), "own")]
    defaults = [with_values(at_scale(recipe.paper, scale, recipe.tiny), protocol) for recipe in recipes]
    if {"-h", "--help"} & set(argv):
        _parse_one(defaults[min(1, len(defaults) - 1)], argv)  # shows the first RL stage's defaults, and exits
    configs: list[RunConfig] = []
    for default in defaults:
        parsed = _parse_one(default, argv)
        if parsed.stage != default.stage:
            raise ConfigError("--stage", f"this recipe runs {default.stage}", f"run recipes/{parsed.stage}.py")
        values: dict[str, Any] = {"scale": scale, **({"model": ""} if configs else {})}
        configs.append(with_values(parsed, values))
    return configs


def _scale(argv: Sequence[str], show: Callable[[str], None]) -> str:
    chosen = _chosen("--scale", argv, ("auto", *SCALES), "auto")
    if chosen != "auto":
        return chosen
    resources = _cluster_resources() if os.environ.get("RAY_ADDRESS") else local_resources()
    scale, reason = detect_scale(resources)
    if "-h" not in argv and "--help" not in argv:
        show(f"scale: {scale} ({reason})")
    return scale


def _chosen(option: str, argv: Sequence[str], choices: Sequence[str], default: str) -> str:
    """What an option that other settings' defaults hang on is set to."""
    chosen = default
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == option:
            chosen = value if equals else next(iter(argv[position + 1 :]), "")
            if not chosen or chosen.startswith("--"):
                raise ConfigError(option, "needs a value", f"choose {', '.join(choices)}")
    if chosen not in choices:
        raise ConfigError(
            option, f"{chosen!r} is no {option.strip('-').rpartition('.')[2]}", f"choose {', '.join(choices)}"
        )
    return chosen


def _cluster_resources() -> dict[str, float]:
    import ray

    connect()
    return {name: float(amount) for name, amount in ray.cluster_resources().items()}


def _parse_one(default: RunConfig, argv: Sequence[str]) -> RunConfig:
    return options_of(RunConfig, argv, default=default, program=_program(), description=sys.modules["__main__"].__doc__)


def _program() -> str:
    return os.path.basename(sys.argv[0] or "recipe")  # noqa: PTH119
