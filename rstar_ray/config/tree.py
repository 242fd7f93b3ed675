"""The whole tree of settings: leaves by dotted name, differences, and what may change when a run resumes."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, cast, get_origin

C = TypeVar("C")
T = TypeVar("T")


@dataclass(frozen=True)
class _MayChange:
    """A resumed run may change the setting: placement, deadlines, and which files are retained."""


MayChange = Annotated[T, _MayChange()]
"""Type of a setting that does not change what a run computes: a run may resume with another value."""


@dataclass(frozen=True)
class _SameAnswers:
    """The setting may change the weights or the set of problems, but not how given weights answer a given problem."""


SameAnswers = Annotated[T, _SameAnswers()]
"""Type of a setting, or of a whole branch, that does not change how a given policy answers a given problem."""

RENAMED = {
    "sandbox.spare_cells": "sandbox.spare_workers",
    "sandbox.calls_per_cell": "sandbox.calls_per_worker",
    "sandbox.cells_per_server": "sandbox.workers_per_server",
}
"""Settings of earlier versions, with their current names."""


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted name."""
    found: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        found |= leaves(value, f"{prefix}{item.name}.") if is_dataclass(value) else {prefix + item.name: value}
    return found


def may_change(config: Any) -> frozenset[str]:
    """The dotted names of the settings that are `MayChange`."""
    return _marked(config, _MayChange())


def same_answers(config: Any) -> frozenset[str]:
    """The dotted names of the settings that are `SameAnswers`, or are in a branch that is."""
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
    defaults = leaves(default)
    return {name: value for name, value in leaves(config).items() if value != defaults[name]}


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
