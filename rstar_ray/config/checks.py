"""What a setting's value must be, said with the option's name and the mend."""

import math

from rstar_ray.errors import ConfigError


def require(holds: bool, name: str, problem: str, mend: str) -> None:
    """Raise `ConfigError` unless it holds."""
    if not holds:
        raise ConfigError(name, problem, mend)


def at_least(minimum: float, **named: float) -> None:
    """Raise `ConfigError` where one is below, or not finite; `rollout__max_turns` is --rollout.max-turns."""
    for name, value in named.items():
        require(value >= minimum, _option(name), f"{value} is too small", f"give at least {minimum}")
        require(math.isfinite(value), _option(name), f"{value} is not finite", "give a finite number")


def at_most(maximum: float, **named: float) -> None:
    """Raise `ConfigError` where one is above."""
    for name, value in named.items():
        require(value <= maximum, _option(name), f"{value} is too much", f"give at most {maximum}")


def share(**named: float) -> None:
    """Raise `ConfigError` where one is not in [0, 1)."""
    for name, value in named.items():
        require(0 <= value < 1, _option(name), f"{value} is no share", "give one in [0, 1)")


def _option(name: str) -> str:
    return "--" + name.replace("__", ".").replace("_", "-")
