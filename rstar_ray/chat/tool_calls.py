"""From a call as it was written to one that can be run (arXiv:2508.20722 section 3.1).

What cannot be parsed is still a call: it gets its error back as a tool answer and counts as failed.
"""

from collections.abc import Mapping
from typing import Any

from rstar_ray.chat.call_syntax import HERMES, CallSyntax, WrittenCall
from rstar_ray.trajectory import ToolCall

TOOL_NAME = "python"
TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Runs a Python program and returns what it prints, or the value of its last expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "the program"},
                "input": {"type": "string", "description": "its standard input"},
            },
            "required": ["code"],
        },
    },
}


def tool_schema(name: str = TOOL_NAME) -> dict[str, Any]:
    """The Python tool as the model is told of it, under another name if need be."""
    return {**TOOL_SCHEMA, "function": {**TOOL_SCHEMA["function"], "name": name}}


def parse_tool_calls(text: str, syntax: CallSyntax = HERMES, *, tool_name: str = TOOL_NAME) -> list[ToolCall]:
    """Every call in `text`, in order; one that cannot be run carries `parse_error`."""
    return [_to_tool_call(call, tool_name) for call in syntax.read(text)]


def _to_tool_call(call: WrittenCall, tool_name: str) -> ToolCall:
    if call.error is not None:
        return ToolCall(parse_error=call.error)
    if call.name != tool_name:
        return ToolCall(parse_error=f"unknown tool {call.name[:40]!r}; the tool is {tool_name!r}")
    arguments: Mapping[str, Any] = call.arguments
    code, stdin = arguments.get("code"), arguments.get("input", "")
    if not isinstance(code, str):
        return ToolCall(parse_error='"code" is missing or not a string')
    if not isinstance(stdin, str):
        return ToolCall(parse_error='"input" is not a string')
    return ToolCall(code=code, stdin=stdin)
