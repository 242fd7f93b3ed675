"""What makes a tool, and what is refused with its mend."""

from typing import Any

import pytest

from rstar_ray.errors import ConfigError
from rstar_ray.tools.schema import argument_fault
from rstar_ray.tools.tool import Tool

ONE = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


async def search(query: str) -> str:
    return query


async def greedy(query: str, limit: int) -> str:
    return query * limit


async def anything(**arguments: Any) -> str:
    return str(arguments)


def blocking(query: str) -> str:
    return query


class State:
    def __init__(self, problem: object, snapshot: str | None) -> None: ...

    async def call(self, other: str) -> str:
        return other


def made(**changes: Any) -> Tool:
    return Tool(**{"name": "search", "description": "?", "parameters": ONE, "function": search, **changes})


def test_a_tool_that_fits_together_is_one():
    assert made().name == "search"
    assert made(function=anything).deadline_s > 0
    assert made(function=None, program="print(1)").program


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "my tool"}, "it is no name"),
        ({"parameters": {"type": "string"}}, 'its "type" is not "object"'),
        ({"parameters": {"type": "object", "properties": {"query": {"type": "text"}}}}, "has the unknown type 'text'"),
        ({"parameters": {"type": "object", "required": ["query"]}}, "'query' is required and no property"),
        ({"parameters": {"type": "object", "properties": []}}, '"properties" are no object'),
        ({"function": None}, "exactly one of function, state and program"),
        ({"program": "print(1)"}, "exactly one of function, state and program"),
        ({"function": blocking}, "its function is not async; write `async def`"),
        ({"function": greedy}, "its schema has no 'limit'; add it to properties, or give it a default"),
        ({"parameters": {**ONE, "required": []}}, "'query' may be left out, but the function needs it"),
        ({"parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}, "its function takes no 'q'"),
        ({"function": None, "state": State}, "its function takes no 'query'"),
        ({"function": None, "program": "print("}, "its program cannot be read"),
        ({"deadline_s": 0.0}, "its deadline or its cap is too small"),
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
        ({"query": "x", "kind": "tall"}, '"kind" is none of long, short'),
        ({"query": "x", "more": 1}, '"more" is unknown; the arguments are query, limit, kind'),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_model(arguments: dict[str, Any], fault: str | None):
    properties = {"query": {"type": "string"}, "limit": {"type": "integer"}, "kind": {"enum": ["long", "short"]}}
    assert argument_fault(arguments, {"type": "object", "properties": properties, "required": ["query"]}) == fault
