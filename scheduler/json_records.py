"""Reads frozen records from JSON; the records check the ranges of their fields."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
NAMES = {int: "a whole number", float: "a number", str: "a string", tuple: "a list"}


def read_record(kind: type[T], value: Any, *, allow_unknown: bool = False) -> T:
    """`value`, an object parsed from JSON, as this record; its fields are int, float, str, tuples and records.

    Raises `ValueError` with the name of a field that is missing, unknown or of another type. `allow_unknown`: ignore
    unknown fields, where files may come from other programs.
    """
    return _read(kind, value, "the record", allow_unknown)


def _read(kind: Any, value: Any, name: str, allow_unknown: bool) -> Any:
    if is_dataclass(kind):
        return _read_fields(kind, value, name, allow_unknown)
    if get_origin(kind) is tuple:
        item_kind = get_args(kind)[0]
        return tuple(_read(item_kind, item, name, allow_unknown) for item in _checked(list | tuple, value, name, tuple))
    return _checked(int | float if kind is float else kind, value, name, kind)


def _read_fields(kind: Any, value: Any, name: str, allow_unknown: bool) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name!r} is {value!r:.40}, not an object")
    kinds, required = _fields(kind)
    for field in sorted(required - value.keys()):
        raise ValueError(f"{field!r} is missing")
    if not allow_unknown:
        for field in sorted(value.keys() - kinds.keys()):
            raise ValueError(f"{field!r} is unknown (known: {', '.join(kinds)})")
    return kind(**{field: _read(kinds[field], value[field], field, allow_unknown) for field in kinds if field in value})


def _checked(accepted: Any, value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ValueError(f"{name!r} is {value!r:.40}, not {NAMES[kind]}")
    return value


@lru_cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Types of the fields by name, and the names without a default."""
    return get_type_hints(kind), frozenset(field.name for field in fields(kind) if field.default is MISSING)
