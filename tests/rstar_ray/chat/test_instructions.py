"""The instructions about tools name those that the model has."""

from rstar_ray.chat.instructions import instructions
from rstar_ray.chat.resolve import resolve
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig
from rstar_ray.trajectory import Problem
from tests.rstar_ray.chat.families import FAMILIES, tokenizer_of


def test_without_a_tool_none_is_spoken_of_or_shown():
    assert instructions([]).startswith("Solve the problem. Think step by step. When you are sure, finish")
    tokenizer = tokenizer_of(FAMILIES["qwen3"])
    chat = TokenizerChat(tokenizer, resolve(tokenizer, {}, ChatConfig()), shows_tools=True, tools=[])
    assert "python" not in chat.decode(chat.prompt_ids(Problem(id="p", problem="q", answer="")))
    text = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    (call,) = chat.read(tokenizer.encode(text, add_special_tokens=False), after_tools=False).calls
    assert call.parse_error == "unknown tool 'python'; there is no tool"
