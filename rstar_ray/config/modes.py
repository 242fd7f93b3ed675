"""Settings that have an effect only in some modes. A field declares its condition; `idle` finds settings without
effect.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from typing import Annotated, Any, cast, get_origin

from rstar_ray.config.options import spelled

_EMPTY: tuple[Any, ...] = ("", ())


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition under which a setting, or a whole branch, has an effect: `Annotated[int, only_with(...)]`."""

    setting: str  # setting that it depends on, by dotted name
    holds: Callable[[Any], bool]  # takes the whole tree
    hint: str  # how to fix an unmet condition
    warn_only: bool  # only warn: several commands share the option

    def problem(self, config: Any) -> str:
        """The message for a tree in which the condition does not hold."""
        value = value_of(config, self.setting)
        if self.setting == "stage":
            return f"has no effect in {value}"
        given = f"with {spelled(self.setting, value)}" if value not in _EMPTY else f"without {spelled(self.setting)}"
        return f"has no effect {given}"


def only_with(setting: str, *values: Any, warn_only: bool = False) -> Condition:
    """Holds where another setting has one of these values."""
    words = " or ".join(spelled(setting, value) for value in values)
    hint = "leave out one of the two" if values[0] in _EMPTY else f"give {words}, or leave it out"
    return Condition(setting, lambda config: value_of(config, setting) in values, hint, warn_only)


def not_with(setting: str, *values: Any, warn_only: bool = False) -> Condition:
    """Holds where another setting has none of these values."""
    hint = f"give {'another ' if values[0] else ''}{spelled(setting)}, or leave it out"
    return Condition(setting, lambda config: value_of(config, setting) not in values, hint, warn_only)


def where(setting: str, holds: Callable[[Any], bool], hint: str, *, warn_only: bool = False) -> Condition:
    """A condition on the whole tree; `setting` is the one that it depends on most."""
    return Condition(setting, holds, hint, warn_only)


OF_TRAINING = not_with("stage", "evaluate", warn_only=True)
OF_RL = not_with("stage", "sft", "evaluate", warn_only=True)
OF_SFT = only_with("stage", "sft", warn_only=True)


def value_of(config: Any, name: str) -> Any:
    """The value of a setting, by its dotted name."""
    return reduce(getattr, name.split("."), config)


def idle(config: Any) -> dict[str, tuple[Condition, ...]]:
    """The leaves without effect in this tree, by dotted name, with the unmet condition."""
    lacking = {
        name: tuple(one for one in needed if not one.holds(config)) for name, needed in conditions(config).items()
    }
    return {name: lacks for name, lacks in lacking.items() if lacks}


def conditions(config: Any, prefix: str = "", above: tuple[Condition, ...] = ()) -> dict[str, tuple[Condition, ...]]:
    """The conditions of each leaf, with those of its branches."""
    found: dict[str, tuple[Condition, ...]] = {}
    for item in fields(config):
        value, declared = getattr(config, item.name), cast(Any, item.type)
        marks = declared.__metadata__ if get_origin(declared) is Annotated else ()
        needed = (*above, *(mark for mark in marks if isinstance(mark, Condition)))
        if is_dataclass(value):
            found |= conditions(value, f"{prefix}{item.name}.", needed)
        else:
            found[prefix + item.name] = needed
    return found
