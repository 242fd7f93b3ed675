"""What makes a tool, and what is refused with its hint."""

from typing import Any

import pytest

from rstar_ray.errors import ConfigError
from rstar_ray.tools.schema import argument_fault, typed
from rstar_ray.tools.tool import Tool

ONE = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


async def search(query: str) -> str:
    return query


async def greedy(query: str, limit: int) -> str:
    return query * limit


def blocking(query: str) -> str:
    return query


class State:
    def __init__(self, problem: object, snapshot: str | None) -> None: ...

    async def call(self, other: str) -> str:
        return other


def made(**changes: Any) -> Tool:
    return Tool(**{"name": "search", "description": "?", "parameters": ONE, "function": search, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "my tool"}, "it is not a name"),
        ({"parameters": {"type": "string"}}, 'its "type" is not "object"'),
        ({"parameters": {"type": "object", "properties": {"query": {"type": "text"}}}}, "has the unknown type 'text'"),
        ({"parameters": {"type": "object", "required": ["query"]}}, "'query' is required and no property"),
        ({"parameters": {"type": "object", "properties": []}}, '"properties" is not an object'),
        ({"function": None}, "exactly one of function, state and program"),
        ({"program": "print(1)"}, "exactly one of function, state and program"),
        ({"function": blocking}, "its function is not async. Hint: write `async def`"),
        ({"failed": search}, "its `failed` is async. Hint: write `def`"),
        ({"function": greedy}, "its schema has no 'limit'. Hint: add it to properties, or give it a default"),
        ({"parameters": {**ONE, "required": []}}, "'query' may be omitted, but the function needs it"),
        ({"parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}, "its function takes no 'q'"),
        ({"function": None, "state": State}, "its function takes no 'query'"),
        ({"function": None, "program": "print("}, "its program cannot be read"),
        (
            {"function": None, "program": "print(1)", "failed": bool},
            "`failed` is not used for a program. Hint: exit with a status other than 0",
        ),
        ({"deadline_s": 0.0}, "its deadline or its cap is too small"),
        (
            {"function": None, "program": "print(1)", "deadline_s": 3_600.0},
            "the sandbox's range. Hint: give deadline_s of 0.01 to 3,599, max_chars up to 16,777,216",
        ),
        ({"function": None, "program": "print(1)", "max_chars": 2**24 + 1}, "outside the sandbox's range"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_that_names_the_tool(changes: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=r"^tool ") as refused:
        made(**changes)
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "limit": 3, "kind": "long"}, None),
        ({}, '"query" is missing'),
        ({"query": 3}, '"query" is not of type string'),
        ({"query": "x", "limit": True}, '"limit" is not of type integer'),
        ({"query": "x", "limit": "3"}, '"limit" is not of type integer'),
        ({"query": "x", "kind": "tall"}, '"kind" is not one of long, short'),
        ({"query": "x", "more": 1}, '"more" is unknown; the arguments are query, limit, kind'),
    ],
)
def test_arguments_that_do_not_fit_are_reported_to_the_model(arguments: dict[str, Any], fault: str | None):
    properties = {"query": {"type": "string"}, "limit": {"type": "integer"}, "kind": {"enum": ["long", "short"]}}
    assert argument_fault(arguments, {"type": "object", "properties": properties, "required": ["query"]}) == fault


def test_an_argument_that_is_nested_too_deeply_for_a_process_boundary_is_reported_to_the_model():
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    assert argument_fault({"a": deep}, {"type": "object", "properties": {"a": {}}}) == '"a" is nested more than 64 deep'
    assert argument_fault({"a": [[{"b": [1]}]]}, {"type": "object", "properties": {"a": {}}}) is None


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, " -3\n", -3),
        ({"type": "integer"}, "+3", 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, "True", "True"),
        ({"type": "number"}, "1e-3", 0.001),
        ({"type": "number"}, "2", 2),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, '[1, "a", true]', [1, "a", True]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "array"}, "[1, 2, ...]", "[1, 2, ...]"),
        ({"type": "array"}, "[b'a', {1}, 1j]", "[b'a', {1}, 1j]"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Itself"}, "3", "3"),
        ({"$ref": "#/$defs/Absent"}, "3", "3"),
        ({"type": "array"}, "[" * 5_000 + "]" * 5_000, "[" * 5_000 + "]" * 5_000),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "__import__('os')", "__import__('os')"),
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "3", "3"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", 4),
        ({"oneOf": [{"type": "boolean"}, {"type": "null"}]}, "none", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": 5}, "5", "5"),
        ({}, "3", "3"),
    ],
)
def test_arguments_written_as_text_have_the_types_of_the_schema_or_stay_text(
    kind: dict[str, Any], text: str, value: object
):
    definitions = {"Point": {"type": "object"}, "Itself": {"anyOf": [{"$ref": "#/$defs/Itself"}, {"type": "null"}]}}
    schema = {"type": "object", "properties": {"a": kind}, "$defs": definitions}
    (found,) = typed({"a": text}, schema).values()
    assert found == value and type(found) is type(value)
