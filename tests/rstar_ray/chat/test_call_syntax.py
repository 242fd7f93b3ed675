"""Tool calls as text: written and read back, malformed ones told, quoted and merely named ones passed over."""

from typing import Any

import pytest

from rstar_ray.chat.call_syntax import SYNTAXES, WrittenCall

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


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", "<tool_call>", "<tool_call> without </tool_call>"),
        ("hermes", '<tool_call>\n{"name": "a", "arguments": {}}', "without </tool_call>"),
        ("hermes", "<tool_call>nonsense</tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "not a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name" is missing'),
        ("hermes", '<tool_call>{"name": "a", "arguments": 5}</tool_call>', '"arguments" is not an object'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
        ("qwen_xml", '<tool_call>{"name": "a"}</tool_call>', "no <function=name>"),
        ("qwen_xml", "<tool_call><function=a><parameter=code>1</function></tool_call>", "not closed"),
        ("qwen_xml", "<tool_call><function=a>code</function></tool_call>", "text beside <parameter=name>"),
        ("glm", "<tool_call>a\n<arg_key>code</arg_key></tool_call>", "not closed"),
        ("deepseek", "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>", "no name and arguments"),
        ("llama_json", '{"name": "a", "parameters": {"code": 1}', "not valid JSON"),
        ("llama_json", '{"name": "a", "parameters": {}} and more', "not valid JSON"),
        ("llama_json", "<|python_tag|>print(1)", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]print(1)", "not valid JSON"),
        ("mistral", '[TOOL_CALLS]{"name": "a"}', "no JSON list"),
    ],
)
def test_what_cannot_be_read_is_still_a_call_that_says_why(name: str, text: str, problem: str):
    (call,) = SYNTAXES[name].read(text)
    assert call.error is not None and problem in call.error


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "I could use <tool_call> for that."),
        ("hermes", 'It reads `<tool_call>{"name": "a", "arguments": {}}</tool_call>`.'),
        ("hermes", 'So:\n```\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n```\nis a call.'),
        ("qwen_xml", "no call at all"),
        ("llama_json", 'One would write {"name": "a", "parameters": {}} then.'),
        ("llama_json", '{"x": 1} is an object'),
    ],
)
def test_a_call_in_prose_is_none(name: str, text: str):
    assert SYNTAXES[name].read(text) == []


def test_an_unclosed_call_does_not_swallow_the_next():
    body = '{"name": "a", "arguments": {}}'
    first, second = SYNTAXES["hermes"].read(f"<tool_call>oops\n<tool_call>{body}</tool_call>")
    assert (first.error is None, second) == (False, WrittenCall("a", {}))


def test_llama_writes_several_calls_with_a_semicolon_between():
    text = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}'
    assert SYNTAXES["llama_json"].read(text) == [WrittenCall("a", {}), WrittenCall("b", {"x": 1})]
