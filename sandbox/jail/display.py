"""A value as IPython shows it: repr, with containers wider than 79 columns on one line per element."""

import types
from collections.abc import Iterable
from typing import Any

WIDTH = 79
MAX_ELEMENTS = 1000
MAX_DEPTH = 40


def show(value: Any) -> str:
    """Return the text of `Out[n]`. Raises whatever the value's own repr raises."""
    return _show(value, 0, 0)


def _show(value: Any, indent: int, depth: int) -> str:
    kind = type(value)
    if kind in _BRACKETS and kind.__repr__ is _BRACKETS[kind][2] and depth < MAX_DEPTH:
        return _container(value, indent, depth)
    if isinstance(value, type) and type(value) is type:
        name, module = value.__qualname__, value.__module__
        return name if module in ("builtins", "exceptions") else f"{module}.{name}"
    if isinstance(value, types.FunctionType):
        return f"<function {value.__module__}.{value.__qualname__}{_signature(value)}>"
    return repr(value)


def _signature(function: types.FunctionType) -> str:
    import inspect

    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return ""


def _container(value: Any, indent: int, depth: int) -> str:
    opening, closing, _ = _BRACKETS[type(value)]
    if not value:
        return repr(value)
    inner = indent + len(opening)
    parts: list[str] = []
    elements: Iterable[Any] = value.items() if type(value) is dict else _in_order(value)
    for number, element in enumerate(elements):
        if number == MAX_ELEMENTS:
            parts.append("...")
            break
        if type(value) is dict:
            key = _show(element[0], inner, depth + 1)
            parts.append(f"{key}: {_show(element[1], inner + len(key) + 2, depth + 1)}")
        else:
            parts.append(_show(element, inner, depth + 1))
    if type(value) is tuple and len(parts) == 1:
        parts[0] += ","
    one_line = f"{opening}{', '.join(parts)}{closing}"
    if indent + len(one_line) <= WIDTH and "\n" not in one_line:
        return one_line
    return opening + (",\n" + " " * inner).join(parts) + closing


def _in_order(value: Any) -> Iterable[Any]:
    if type(value) in (set, frozenset):
        try:
            return sorted(value)
        except Exception:
            return value
    return value


_BRACKETS: dict[type, tuple[str, str, Any]] = {
    list: ("[", "]", list.__repr__),
    tuple: ("(", ")", tuple.__repr__),
    dict: ("{", "}", dict.__repr__),
    set: ("{", "}", set.__repr__),
    frozenset: ("frozenset({", "})", frozenset.__repr__),
}
