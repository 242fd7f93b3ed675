"""What a model is told of its tools is about those it has."""

from dataclasses import replace

import pytest

from rstar_ray.chat.instructions import instructions
from rstar_ray.chat.resolve import ChatChoices, resolve
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.tools.spec import PYTHON_TOOL
from rstar_ray.trajectory import Problem
from tests.rstar_ray.chat.families import FAMILIES, tokenizer_of

SEARCH = replace(PYTHON_TOOL, name="search", runs="actor")
NOTES = replace(SEARCH, name="notes", runs="actor with state")


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([PYTHON_TOOL], "you may write Python and run it with the tool, look at what it returns and go on from there"),
        ([SEARCH], "you may call the tool search, look at what it returns and go on from there"),
        ([SEARCH, NOTES], "you may call the tools search and notes, look at what they return and go on from there"),
        ([PYTHON_TOOL, SEARCH], "run it with the tool python, and call search; look at what they return"),
        ([NOTES, replace(PYTHON_TOOL, name="py"), SEARCH], "with the tool py, and call notes and search; look"),
    ],
)
def test_instructions_name_the_tools_in_use(tools: list[object], said: str):
    text = instructions(tools)  # type: ignore[arg-type]
    assert said in text and ("Python" in text) == any(tool.runs == "python" for tool in tools)  # type: ignore[attr-defined]
    assert text.endswith("finish with <answer>\\boxed{...}</answer>, once.")


def test_without_a_tool_none_is_spoken_of_or_shown():
    assert instructions([]).startswith("Solve the problem. Think step by step. When you are sure, finish")
    tokenizer = tokenizer_of(FAMILIES["qwen3"])
    chat = TokenizerChat(tokenizer, resolve(tokenizer, {}, ChatChoices()), shows_tools=True, tools=[])
    assert "python" not in chat.decode(chat.prompt_ids(Problem(id="p", problem="q", answer="")))
    text = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    (call,) = chat.read(tokenizer.encode(text, add_special_tokens=False), after_tools=False).calls
    assert call.parse_error == "unknown tool 'python'; there is none"
