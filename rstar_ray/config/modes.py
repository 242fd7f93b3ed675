"""Settings that mean something in some mode alone: the field says in which, and `idle` which of a tree mean nothing."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from typing import Annotated, Any, cast, get_origin

from rstar_ray.config.options import spelled

_EMPTY: tuple[Any, ...] = ("", ())


@dataclass(frozen=True, slots=True)
class Condition:
    """What a setting, or a whole branch, needs to mean something: `Annotated[int, only_with(...)]`."""

    setting: str  # that it hangs on, by its dotted name
    holds: Callable[[Any], bool]  # of a whole tree
    hint: str  # what to give, or to leave out, where it does not hold
    warn_only: bool  # commands that share options have it too: a line says so, where another is refused

    def problem(self, config: Any) -> str:
        """Of a tree in which it does not hold."""
        value = value_of(config, self.setting)
        if self.setting == "stage":
            return f"means nothing to {value}"
        given = f"with {spelled(self.setting, value)}" if value not in _EMPTY else f"without {spelled(self.setting)}"
        return f"means nothing {given}"


def only_with(setting: str, *values: Any, warn_only: bool = False) -> Condition:
    """Where another setting has one of these values."""
    words = " or ".join(spelled(setting, value) for value in values)
    hint = "leave out one of the two" if values[0] in _EMPTY else f"give {words}, or leave it out"
    return Condition(setting, lambda config: value_of(config, setting) in values, hint, warn_only)


def not_with(setting: str, *values: Any, warn_only: bool = False) -> Condition:
    """Where another setting has none of these values."""
    hint = f"give {'another ' if values[0] else ''}{spelled(setting)}, or leave it out"
    return Condition(setting, lambda config: value_of(config, setting) not in values, hint, warn_only)


def where(setting: str, holds: Callable[[Any], bool], hint: str, *, warn_only: bool = False) -> Condition:
    """Where this holds of the tree; `setting` is what it hangs on most."""
    return Condition(setting, holds, hint, warn_only)


OF_TRAINING = not_with("stage", "evaluate", warn_only=True)
OF_RL = not_with("stage", "sft", "evaluate", warn_only=True)
OF_SFT = only_with("stage", "sft", warn_only=True)


def value_of(config: Any, name: str) -> Any:
    """Of a setting by its dotted name."""
    return reduce(getattr, name.split("."), config)


def idle(config: Any) -> dict[str, tuple[Condition, ...]]:
    """The leaves that mean nothing in this tree, by dotted name, with what they lack."""
    lacking = {
        name: tuple(one for one in needed if not one.holds(config)) for name, needed in conditions(config).items()
    }
    return {name: lacks for name, lacks in lacking.items() if lacks}


def conditions(config: Any, prefix: str = "", above: tuple[Condition, ...] = ()) -> dict[str, tuple[Condition, ...]]:
    """What each leaf needs, its branch's conditions among it."""
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
