"""Bounds of settings; a violation is reported with the option's name and a fix."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from rstar_ray.config.options import spelled
from rstar_ray.errors import ConfigError


def require(holds: bool, name: str, problem: str, hint: str) -> None:
    """Raise `ConfigError` unless it holds."""
    if not holds:
        raise ConfigError(name, problem, hint)


@dataclass(frozen=True, slots=True)
class Bound:
    """A constraint on a number, declared beside its field: `Annotated[int, at_least(1)]`."""

    holds: Callable[[float], bool]
    rule: str
    hint: str = "use a value in that range"


def at_least(minimum: float) -> Bound:
    return Bound(lambda value: value >= minimum, f"must be at least {minimum}", "use a larger value")


def at_most(maximum: float) -> Bound:
    return Bound(lambda value: value <= maximum, f"must be at most {maximum}", "use a smaller value")


def within(interval: str) -> Bound:
    """Bounds from an interval in mathematical notation.

    >>> within("[0, 1)").holds(0), within("[0, 1)").holds(1), within("(0, inf)").holds(0)
    (True, False, False)
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    return Bound(lambda value: above(value, low) and below(value, high), f"must be in {interval}")


FINITE = Bound(math.isfinite, "must be finite", "use a number")


def check_bounds(branch: str, record: Any) -> None:
    """Raise `ConfigError` for a number outside the bounds of its field. A field with bounds must also be finite."""
    for item in fields(record):
        marks = getattr(item.type, "__metadata__", ())
        bounds = [mark for mark in marks if isinstance(mark, Bound)]
        value = getattr(record, item.name)
        for bound in (*bounds, FINITE) if bounds else ():
            name = spelled(f"{branch}.{item.name}" if branch else item.name)
            require(bound.holds(value), name, f"{bound.rule} (got {value})", bound.hint)
