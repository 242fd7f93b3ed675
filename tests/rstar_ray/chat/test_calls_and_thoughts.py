"""Edge cases of calls, thoughts and templates that a chat format has to decide."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from rstar_ray.chat.call_syntax import SYNTAXES, WrittenCall
from rstar_ray.chat.chat_profile import THOUGHTS
from rstar_ray.chat.resolve import resolve
from rstar_ray.chat.streamed import spoken, where_calls_stand
from rstar_ray.chat.tool_calls import parse_tool_calls
from rstar_ray.config import ChatConfig
from rstar_ray.errors import ConfigError
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec
from rstar_ray.trajectory import ToolCall
from tests.rstar_ray.chat.families import FAMILIES, Family, chat_with, tokenizer_of

# -- calls -------------------------------------------------------------------------------------------------------------

OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
INVALID = "invalid"
CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]] | str]]] = [
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>', [("a", {"x": 1})]),
    ("hermes", '<tool_call> \r\n\t{"name": "a", "arguments": "{}"} </tool_call>', [("a", {})]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', [INVALID]),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', [INVALID]),
    ("hermes", '<tool_call>{"name": "a", "arguments": "[]"}</tool_call>', [INVALID]),
    ("hermes", "<tool_call>7</tool_call>", [INVALID]),
    ("hermes", "so <tool_call>", [INVALID]),
    ("hermes", "so <tool_call> is\n", []),
    ("hermes", "so\n <tool_call> is\n", [INVALID]),
    ("hermes", "so <tool_call> [", [INVALID]),
    ("hermes", "so <tool_call> a <tool_call>", [INVALID]),
    ("hermes", 'a `<tool_call>{"name": "a", "arguments": {}}</tool_call>` b', []),
    ("hermes", 'a `<tool_call>{"name": "a", "arguments": {}}</tool_call> b', [("a", {})]),
    ("hermes", '```\n```\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n```\n', [("a", {})]),
    ("hermes", ' ```\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n ```\nNo.', []),
    ("hermes", '```\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n', [("a", {})]),
    ("qwen_xml", "<tool_call><function= a ><parameter=x>\n\n1\n\n</parameter></function></tool_call>",
     [("a", {"x": "\n1\n"})]),
    ("qwen_xml", "<tool_call><function=a></function></tool_call>", [("a", {})]),
    ("qwen_xml", "<tool_call>x</tool_call>", [INVALID]),
    ("qwen_xml", "<tool_call><function=a>x<parameter=x>1</parameter></function></tool_call>",
     [INVALID]),
    ("glm", "<tool_call>a\n<arg_key> x </arg_key>\n<arg_value> 1 </arg_value></tool_call>", [("a", {"x": " 1 "})]),
    ("glm", "<tool_call> a </tool_call>", [("a", {})]),
    ("glm", "<tool_call></tool_call>", [INVALID]),
    ("glm", "<tool_call>{a}</tool_call>", [INVALID]),
    ("glm", "<tool_call><b></tool_call>", [INVALID]),
    ("glm", "<tool_call>a <arg_key>x</arg_key></tool_call>",
     [INVALID]),
    ("deepseek", f'{OPEN}function<｜tool▁sep｜> a \n```json\n{{"x": 1}}\n```{CLOSE}', [("a", {"x": 1})]),
    ("deepseek", f'{OPEN} a <｜tool▁sep｜>{{"x": 1}}{CLOSE}', [("a", {"x": 1})]),
    ("deepseek", f"{OPEN}a{CLOSE}", [INVALID]),
    ("deepseek", f"{OPEN}a<｜tool▁sep｜>[]{CLOSE}", [INVALID]),
    ("llama_json", ' {"name": "a", "parameters": {"x": 1}} ', [("a", {"x": 1})]),
    ("llama_json", '{"name": "a", "arguments": {"x": 1}}', [("a", {"x": 1})]),
    ("llama_json", '{"name": "a"}', [INVALID]),
    ("llama_json", '<|python_tag|> {"name": "a", "parameters": {}};{"type": "b", "name": "b", "parameters": {}}',
     [("a", {}), ("b", {})]),
    ("llama_json", '{ "function": "a", "name": "c", "parameters": {}}', [("c", {})]),
    ("llama_json", '{"other": "a"}', []),
    ("llama_json", "", []),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 2}}]',
     [("a", {}), ("b", {"x": 2})]),
    ("mistral", '[TOOL_CALLS] a [ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', [("a", {"x": 1}), ("b", {})]),
    ("mistral", "[TOOL_CALLS]a[ARGS][]", [INVALID]),
    ("mistral", "[TOOL_CALLS]5", [INVALID]),
    ("mistral", "none", []),
]  # fmt: skip


PYTHON = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f"I compute.\n```xml\n{PYTHON}\n```", 1),  # vLLM's parser, which serves the policy later, runs it too
        (f"```\n{PYTHON}\n```\n```\n{PYTHON}\n```\n", 2),
        (f"```\n{PYTHON}\n```\nThat is how a call looks.", 0),
        (f"I would write `{PYTHON}`", 0),
        (f"```\n{PYTHON.replace('python', 'other')}\n```", 0),
        ("```\n<tool_call>{broken</tool_call>\n```", 0),
    ],
    ids=["fenced at the end", "two fences", "text follows", "inline", "unknown tool", "malformed"],
)
def test_a_fenced_call_counts_where_it_ends_the_turn_and_can_be_run(text: str, num_calls: int):
    assert len(parse_tool_calls(text, tools={PYTHON_TOOL.name: PYTHON_TOOL})) == num_calls


def test_calls_are_read_and_malformed_ones_are_invalid():
    def read(name: str, text: str) -> list[tuple[str, Mapping[str, Any]] | str]:
        return [(one.name, one.arguments) if one.error is None else INVALID for one in SYNTAXES[name].read(text)]

    assert [(name, text, read(name, text)) for name, text, _ in CALLS] == CALLS


HARD = {"code": 'print("a</tool_call>b")\nfor i in x:\n    y = {1: "<tool_call>"}', "input": "1 2\n"}


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("arguments", [HARD, {"code": "x"}, {"code": ""}, {"code": "a\n\n"}])
def test_what_a_syntax_writes_it_reads_back(name: str, arguments: dict[str, Any]):
    syntax = SYNTAXES[name]
    assert syntax.read(syntax.write("python", arguments)) == [WrittenCall("python", arguments)]


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "glm", "deepseek", "mistral"])
def test_calls_are_found_after_words_and_several_in_order(name: str):
    syntax = SYNTAXES[name]
    text = "Let me see.\n" + syntax.write("a", {"code": "1"}) + "\n" + syntax.write("b", {"code": "2"})
    assert [call.name for call in syntax.read(text)] == ["a", "b"]


ADD = ToolSpec(
    name="add", description="?", runs="actor",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
)  # fmt: skip


def test_arguments_in_text_get_the_types_of_the_tool_and_those_in_json_keep_theirs():
    tools = {"add": ADD}
    as_text, as_json = (SYNTAXES[name].write("add", {"a": "7"}) for name in ("glm", "hermes"))
    assert parse_tool_calls(as_text, SYNTAXES["glm"], tools) == [ToolCall(tool="add", arguments={"a": 7})]
    (refused,) = parse_tool_calls(as_json, SYNTAXES["hermes"], tools)
    assert refused.parse_error and refused.tool == "add"
    assert parse_tool_calls(SYNTAXES["hermes"].write("python", {"code": "1"})) == [ToolCall(code="1", tool="python")]


# -- thoughts ----------------------------------------------------------------------------------------------------------

THINK, REASON = THOUGHTS[:2]


@pytest.mark.parametrize(
    ("text", "inside", "said"),
    [
        ("a", False, "a"), ("a", True, ""), ("a</think>b", True, "b"), ("a</think>b", False, "b"),
        ("<think>a</think>b", False, "b"), ("<think>a</think>b", True, "b"), ("a<think>b", False, "a"),
        ("a<think>b</think>c<think>d</think>e", False, "ace"), ("</think>a<think>b", False, "a"),
        ("<think></think>", False, ""), ("", True, ""), ("a</think>b<think>c</think>d", True, "bd"),
    ],
)  # fmt: skip
def test_what_is_said_is_what_is_not_thought(text: str, inside: bool, said: str):
    assert spoken(text, THINK, inside=inside) == said
    assert where_calls_stand(text, THINK, inside=inside) == said
    other = text.replace("think", "reason")
    assert spoken(other, REASON, inside=inside) == said.replace("think", "reason")
    assert where_calls_stand(other, REASON, inside=inside) == other


# -- what does not fit -------------------------------------------------------------------------------------------------

QWEN = FAMILIES["qwen3"]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
OPENS = "{% if add_generation_prompt %}assistant:{% endif %}"
REFUSED = [
    ("", ChatConfig(), "--chat.template"),
    ("{{ missing() }}", ChatConfig(), "--chat.template"),
    ("{# #}words", ChatConfig(), "--chat.template"),
    (PLAIN, ChatConfig(), "--chat.template"),
    (PLAIN + OPENS, ChatConfig(thinking="on"), "--chat.thinking"),
    (PLAIN.replace("<|im_end|>", ";") + OPENS, ChatConfig(), "--chat.stop"),
    ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}" + OPENS, ChatConfig(),
     "--chat.template"),
    (PLAIN + OPENS, ChatConfig(parser="best"), "--chat.parser"),
    (PLAIN + OPENS, ChatConfig(stop=("a b",)), "--chat.stop"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "choices", "option"), REFUSED)
def test_a_template_that_does_not_fit_is_refused_by_its_option(template: str, choices: ChatConfig, option: str):
    tokenizer = copy.copy(tokenizer_of(Family(template or "\n", "<|im_end|>", QWEN.special)))
    tokenizer.chat_template = tokenizer.chat_template.strip() or None
    with pytest.raises(ConfigError) as refused:
        resolve(tokenizer, {}, choices)
    assert refused.value.field == option


def test_a_turn_is_read_without_the_token_that_ended_it():
    chat = chat_with(tokenizer_of(QWEN))
    ids = list(chat.tokenizer.encode("<think>a</think>b<|im_end|>", add_special_tokens=False))
    assert chat.read(ids, after_tools=False).text == "<think>a</think>b"
    assert chat.read(ids, after_tools=False).spoken == "b"
    assert chat.read([*ids, *ids[:1]], after_tools=False).text == "<think>a</think>b<|im_end|><think>"
    assert chat.read([], after_tools=True).text == ""
    assert chat.as_content(chat.read(ids, after_tools=False), after_tools=False) == "<think>a</think>b"
    opened = chat_with(tokenizer_of(FAMILIES["qwen3.5"]))
    reading = opened.read(list(opened.tokenizer.encode("a</think>b", add_special_tokens=False)), after_tools=False)
    assert (reading.spoken, opened.as_content(reading, after_tools=False)) == ("b", "<think>\na</think>b")
