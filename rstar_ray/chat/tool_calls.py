"""Checks parsed calls against the tools in use (arXiv:2508.20722 section 3.1).

A malformed call is still a call: the model receives the error as the result, and the call counts as failed.
"""

from collections.abc import Container, Mapping

from rstar_ray.chat.call_syntax import HERMES, CallSyntax, WrittenCall
from rstar_ray.tools.schema import argument_fault, typed
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec
from rstar_ray.trajectory import ToolCall

ONLY_PYTHON = {PYTHON_TOOL.name: PYTHON_TOOL}
MAX_CHARS = 2**18
"""Longest turn whose calls are parsed, because parsing blocks the event loop."""
MAX_CALLS = 1_024
"""Most calls of a turn, because each call's result must be encoded."""


def parse_tool_calls(
    text: str, syntax: CallSyntax = HERMES, tools: Mapping[str, ToolSpec] | None = ONLY_PYTHON
) -> list[ToolCall]:
    """Every call in `text`, in order; one that cannot be run has a `parse_error`.

    `tools`: None if an agent of the user defines them. Their names and arguments are then not checked.
    """
    return [_to_tool_call(call, tools, typed_already=syntax.typed) for call in written_calls(text, syntax, tools)]


def written_calls(text: str, syntax: CallSyntax, names: Container[str] | None) -> list[WrittenCall]:
    """Every call in `text`, in order, not yet checked against its tool.

    `names` are those of the tools in use; None if they are unknown.

    A text that is too long, or holds too many calls, is one malformed call.
    """
    if len(text) > MAX_CHARS:
        too_long = f"the turn has {len(text):,} characters; calls are read in up to {MAX_CHARS:,}"
        return [WrittenCall(error=too_long)] if syntax.attempts(text) else []
    calls = [
        call
        for call in syntax.read(text)
        if not call.fenced or (call.error is None and (names is None or call.name in names))
    ]
    if len(calls) > MAX_CALLS:
        return [WrittenCall(error=f"the turn holds {len(calls):,} calls; at most {MAX_CALLS:,} are read")]
    return calls


def _to_tool_call(call: WrittenCall, tools: Mapping[str, ToolSpec] | None, *, typed_already: bool) -> ToolCall:
    if call.error is not None:
        return ToolCall(parse_error=call.error)
    if tools is None:
        program = _to_program(call, PYTHON_TOOL)
        is_program = call.name == PYTHON_TOOL.name and program.parse_error is None
        return program if is_program else ToolCall(tool=call.name, arguments=dict(call.arguments))
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(map(repr, tools))
        said = f"the tool is {known}" if len(tools) == 1 else f"the tools are {known}" if tools else "there is no tool"
        return ToolCall(parse_error=f"unknown tool {call.name[:40]!r}; {said}")
    if tool.runs == "python":
        return _to_program(call, tool)
    arguments = dict(call.arguments) if typed_already else typed(call.arguments, tool.parameters)
    if fault := argument_fault(arguments, tool.parameters):
        return ToolCall(tool=tool.name, parse_error=fault)
    return ToolCall(tool=tool.name, arguments=arguments)


def _to_program(call: WrittenCall, tool: ToolSpec) -> ToolCall:
    """Other arguments beside the program are ignored."""
    code, stdin = call.arguments.get("code"), call.arguments.get("input", "")
    if not isinstance(code, str):
        return ToolCall(tool=tool.name, parse_error='"code" is missing or not a string')
    if not isinstance(stdin, str):
        return ToolCall(tool=tool.name, parse_error='"input" is not a string')
    return ToolCall(code=code, stdin=stdin, tool=tool.name)
