"""Tool calls, hermes style: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (arXiv:2508.20722 section 3.1).

What cannot be parsed is still a call: it gets its error back as a tool answer and counts as failed.
"""

import json
import re
from typing import Any, cast

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
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(_OPEN) + r"(.*?)(?:" + re.escape(_CLOSE) + r"|(?=<tool_call>)|\Z)", re.DOTALL)


def parse_tool_calls(completion: str) -> list[ToolCall]:
    """Every call of one completion, in order; an unclosed or malformed one carries `parse_error`."""
    return [
        _parse_call(match[1]) if match[0].endswith(_CLOSE) else ToolCall(parse_error=f"{_OPEN} without {_CLOSE}")
        for match in _CALL.finditer(completion)
    ]


def _parse_call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except ValueError as error:
        return ToolCall(parse_error=f"not valid JSON: {error}")
    except RecursionError:
        return ToolCall(parse_error="not valid JSON: nested too deeply")
    if not isinstance(call, dict):
        return ToolCall(parse_error="not a JSON object")
    call = cast(dict[str, Any], call)
    if call.get("name") != TOOL_NAME:
        return ToolCall(parse_error=f"unknown tool {str(call.get('name'))[:40]!r}; the tool is {TOOL_NAME!r}")
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return ToolCall(parse_error='"arguments" is not an object')
    arguments = cast(dict[str, Any], arguments)
    code, stdin = arguments.get("code"), arguments.get("input", "")
    if not isinstance(code, str):
        return ToolCall(parse_error='"code" is missing or not a string')
    if not isinstance(stdin, str):
        return ToolCall(parse_error='"input" is not a string')
    return ToolCall(code=code, stdin=stdin)
