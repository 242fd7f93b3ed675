"""The instructions before each problem for a model that was not fine-tuned on the task: the tools and the
answer format.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rstar_ray.config import ChatConfig
from rstar_ray.tools.spec import ToolSpec


def system_text(config: ChatConfig, tools: Sequence[ToolSpec], *, instruct: bool) -> str:
    """The text before a problem or a conversation; may be empty. `instruct` is for models without SFT on the task."""
    if config.system == "none":
        return ""
    return config.system or (instructions(tools) if instruct else "")


def opened(messages: Sequence[Mapping[str, Any]], system: str, before: str) -> list[Mapping[str, Any]]:
    """The conversation as a problem would begin it: `before` in its first question, `system` first unless it
    has a system message.
    """
    result = list(messages)
    first = next((number for number, message in enumerate(result) if message["role"] == "user"), None)
    if before and first is not None:
        result[first] = {**result[first], "content": f"{before}{result[first]['content']}"}
    if system and (not result or result[0]["role"] != "system"):
        result.insert(0, {"role": "system", "content": system})
    return result


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
