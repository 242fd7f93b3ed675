"""Compares written function calls with the expected ones, as in BFCL's single-turn sets.

A model sees functions in its question and writes calls, as Python (`[f(a=1), g(b="x")]`) or as JSON (`[{"name":
"f", "arguments": {"a": 1}}]`). Nothing is called.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rstar_ray.reward.find import last_program, spoken

MAX_CHARS = 20_000
"""Longer calls are rejected."""


@dataclass(frozen=True, slots=True)
class Written:
    """A call as written."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An expected call: the allowed values of each argument; an empty string among them makes it optional."""

    name: str
    arguments: Mapping[str, Sequence[Any]]


def read_wanted(truth: str) -> list[Wanted]:
    """Calls of a ground truth: `[{"name": "f", "arguments": {"a": [1, "1"]}}, ...]`, or `[]` where no call is
    right.

    Raises ValueError with the reason.
    """
    try:
        written: Any = json.loads(truth)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(written, list):
        raise ValueError("holds no list of calls")
    return [_wanted(row, number) for number, row in enumerate(cast(list[Any], written), 1)]


def _wanted(row: Any, number: int) -> Wanted:
    fields = cast(dict[str, Any], row) if isinstance(row, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f'call {number} has no "name" and "arguments"')
    allowed = cast(dict[str, Any], arguments)
    for argument, values in allowed.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"call {number} names no values for {argument}")
    return Wanted(name, allowed)


def same_calls(completion: str, wanted: Sequence[Wanted]) -> bool:
    """Whether exactly these calls are written, in any order."""
    written = written_calls(completion)
    if len(written) != len(wanted):
        return False
    fitting = [[place for place, call in enumerate(written) if _fits(call, one)] for one in wanted]
    taken: dict[int, int] = {}  # by place in `written`: which wanted call it is
    return all(_matched(one, fitting, taken, set()) for one in range(len(wanted)))


def _matched(one: int, fitting: Sequence[Sequence[int]], taken: dict[int, int], tried: set[int]) -> bool:
    """Match a wanted call to a written one, and reassign earlier matches if needed (an augmenting path)."""
    for place in fitting[one]:
        if place not in tried:
            tried.add(place)
            if place not in taken or _matched(taken[place], fitting, taken, tried):
                taken[place] = one
                return True
    return False


def written_calls(completion: str) -> list[Written]:
    """The calls of a completion: of its last fenced block, else of its last `<answer>`, else of its whole text."""
    text = (last_program(completion) or spoken(completion)).strip()
    if len(text) > MAX_CHARS:
        return []
    opens = min((at for at in (text.find("["), text.find("{")) if at >= 0), default=0)
    within = text[opens : max(text.rfind("]"), text.rfind("}")) + 1]
    for candidate in dict.fromkeys((text, within)):
        found = _as_json(candidate) or _as_python(candidate)
        if found:
            return found
    return []


def _as_json(text: str) -> list[Written]:
    try:
        read: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls: list[Written] = []
    for row in cast(list[Any], read) if isinstance(read, list) else [read]:
        fields = cast(dict[str, Any], row) if isinstance(row, dict) else {}
        name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        calls.append(Written(name, cast(dict[str, Any], arguments)))
    return calls


def _as_python(text: str) -> list[Written]:
    try:
        read = ast.parse(text, mode="eval").body
        nodes = read.elts if isinstance(read, ast.List | ast.Tuple) else [read]
        return [_call(node) for node in nodes]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []


def _call(node: ast.expr) -> Written:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call with named arguments")
    values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return Written(ast.unparse(node.func), values)


def _fits(call: Written, wanted: Wanted) -> bool:
    if call.name != wanted.name or set(call.arguments) - set(wanted.arguments):
        return False
    return all(
        any(_same(call.arguments[name], one) for one in allowed) if name in call.arguments else "" in allowed
        for name, allowed in wanted.arguments.items()
    )


def _same(given: Any, wanted: Any) -> bool:
    """Text is compared without case, spaces and light punctuation; 3 equals 3.0, but neither equals True;
    objects are compared by value.
    """
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, str) and isinstance(wanted, str):
        return _plain(given) == _plain(wanted)
    if isinstance(given, list | tuple) and isinstance(wanted, list):
        ours, theirs = list(cast(Sequence[Any], given)), cast(list[Any], wanted)
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return _same_object(cast(dict[str, Any], given), cast(dict[str, Any], wanted))
    return given == wanted


def _same_object(given: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """The ground truth lists the allowed values of each key, as for arguments."""
    choices: dict[str, list[Any]] = {key: one if isinstance(one, list) else [one] for key, one in wanted.items()}
    return not set(given) - set(choices) and all(
        any(_same(given[key], one) for one in allowed) or _same(given[key], allowed) if key in given else "" in allowed
        for key, allowed in choices.items()
    )


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
