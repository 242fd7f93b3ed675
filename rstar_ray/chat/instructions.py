"""What a model that was not taught its task is told before each problem: which tools there are, and how it answers."""

from collections.abc import Sequence

from rstar_ray.tools.spec import ToolSpec


def instructions(tools: Sequence[ToolSpec]) -> str:
    """For the tools in use; their schemas are shown beside it."""
    said = f"; {_calls(tools)}" if tools else ""
    answers = "When you are sure, finish with <answer>\\boxed{...}</answer>, once."
    return f"Solve the problem. Think step by step{said}. {answers}"


def _calls(tools: Sequence[ToolSpec]) -> str:
    names = [tool.name for tool in tools if tool.runs != "python"]
    writes = next((tool.name for tool in tools if tool.runs == "python"), None)
    if not names:
        return "you may write Python and run it with the tool, look at what it returns and go on from there"
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    if writes:
        program = f"you may write Python and run it with the tool {writes}, and call {listed}"
        return f"{program}; look at what they return and go on from there"
    tool, returns = ("tool", "it returns") if len(names) == 1 else ("tools", "they return")
    return f"you may call the {tool} {listed}, look at what {returns} and go on from there"
