"""The whole tree of settings: leaves by dotted name, differences, and what may change when a run resumes."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, cast, get_origin

C = TypeVar("C")
T = TypeVar("T")


@dataclass(frozen=True)
class _GoesOn:
    """A resumed run may change it: where it runs, how long it waits, and what it keeps."""


MayChange = Annotated[T, _GoesOn()]
"""The type of a setting that does not change what a run computes, so that a run may resume with another value of it."""


@dataclass(frozen=True)
class _SameAnswers:
    """It may change the weights or the set of problems, but not how given weights answer a given problem."""


SameAnswers = Annotated[T, _SameAnswers()]
"""The type of a setting, or of a whole branch, that changes nothing of how a given policy answers a given problem."""


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted name."""
    found: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        found |= leaves(value, f"{prefix}{item.name}.") if is_dataclass(value) else {prefix + item.name: value}
    return found


def may_change(config: Any) -> frozenset[str]:
    """The dotted names of the settings that are `MayChange`."""
    return _marked(config, _GoesOn())


def same_answers(config: Any) -> frozenset[str]:
    """The dotted names of the settings that are `SameAnswers`, or stand in a branch that is."""
    return _marked(config, _SameAnswers())


def _marked(config: Any, mark: object, prefix: str = "", *, whole: bool = False) -> frozenset[str]:
    found: set[str] = set()
    for item in fields(config):
        value, declared = getattr(config, item.name), cast(Any, item.type)
        marked = whole or (get_origin(declared) is Annotated and mark in declared.__metadata__)
        if is_dataclass(value):
            found |= _marked(value, mark, f"{prefix}{item.name}.", whole=marked)
        elif marked:
            found.add(prefix + item.name)
    return frozenset(found)


def differences(config: Any, default: Any) -> dict[str, Any]:
    """The leaves in which two configurations of one type differ, by dotted name."""
    theirs = leaves(default)
    return {name: value for name, value in leaves(config).items() if value != theirs[name]}


def with_values(config: C, values: dict[str, Any]) -> C:
    """A copy with the leaves named by dotted path set; every check runs again."""
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            flat[head] = value
    for head, inner in nested.items():
        flat[head] = with_values(getattr(config, head), inner)
    return cast(C, replace(cast(Any, config), **flat))
