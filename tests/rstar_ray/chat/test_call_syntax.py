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
