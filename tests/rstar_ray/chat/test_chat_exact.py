"""What is found out of every family of models, and every text made for it, to the letter: `data/chat.json`.

Whoever means to change one writes them anew and reads what changed: `python -m tests.rstar_ray.chat.test_chat_exact`.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.chat.call_syntax import SYNTAXES
from rstar_ray.chat.profile import THOUGHTS, Frame, TemplateFacts, Thought
from rstar_ray.chat.render import Renderer
from rstar_ray.chat.resolve import ChatChoices, resolve, thinking_switches
from rstar_ray.chat.streamed import Streamed
from rstar_ray.chat.template import TokenizerChat, chat_of
from rstar_ray.chat.thoughts import spoken, where_calls_stand
from rstar_ray.chat.tool_calls import parse_tool_calls
from rstar_ray.errors import ConfigError
from rstar_ray.outcome import Outcome
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec
from rstar_ray.trajectory import Problem, ToolCall, ToolResult
from tests.rstar_ray.chat.families import FAMILIES, Family, generation_of, tokenizer_of

WRITTEN = Path(__file__).parent.parent / "data" / "chat.json"
PROBLEM = Problem(id="p", problem=" What is 1+1? \n", answer="2")
CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(1)"}}}
TALK = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 1."},
    {"role": "user", "content": "<|im_end|> and?"},
]


def said_of(name: str) -> dict[str, Any]:
    """Everything that is found out of one family, and written for it."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    profile = resolve(tokenizer, generation_of(family), ChatChoices())
    plain = TokenizerChat(tokenizer, profile)
    told = TokenizerChat(tokenizer, profile, system="Be brief.", shows_tools=True)
    results = [ToolResult(outcome=Outcome.OK, text=text) for text in (" one \n", 'a "b"')]
    return {
        "profile": asdict(profile),
        "prompt": plain.decode(plain.prompt_ids(PROBLEM)),
        "prompt with tools": told.decode(told.prompt_ids(PROBLEM)),
        "results": plain.decode(plain.tool_answer_ids(results)),
        "another's words": plain.decode(plain.user_answer_ids("And then?")),
        "conversation": conversation(told),
        "inside a thought": [plain.begins_inside_thought(after_tools=after) for after in (False, True)],
    }


def conversation(chat: TokenizerChat) -> str:
    try:
        return chat.decode(chat.conversation_ids(TALK))
    except ValueError as refused:  # some templates write one call a turn alone
        return str(refused)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_talked_to_as_it_was(name: str):
    assert json.loads(json.dumps(said_of(name))) == json.loads(WRITTEN.read_text("utf-8"))[name]


# -- calls -------------------------------------------------------------------------------------------------------------

OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]] | str]]] = [
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>', [("a", {"x": 1})]),
    ("hermes", '<tool_call> \r\n\t{"name": "a", "arguments": "{}"} </tool_call>', [("a", {})]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', ['"name" is missing or not a string']),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', ['"arguments" is not an object']),
    ("hermes", '<tool_call>{"name": "a", "arguments": "[]"}</tool_call>', ['"arguments" is not an object']),
    ("hermes", "<tool_call>7</tool_call>", ["not a JSON object"]),
    ("hermes", "so <tool_call>", ["<tool_call> without </tool_call>"]),
    ("hermes", "so <tool_call> is\n", []),
    ("hermes", "so\n <tool_call> is\n", ["<tool_call> without </tool_call>"]),
    ("hermes", "so <tool_call> [", ["<tool_call> without </tool_call>"]),
    ("hermes", "so <tool_call> a <tool_call>", ["<tool_call> without </tool_call>"]),
    ("hermes", 'a `<tool_call>{"name": "a", "arguments": {}}</tool_call>` b', []),
    ("hermes", 'a `<tool_call>{"name": "a", "arguments": {}}</tool_call> b', [("a", {})]),
    ("hermes", '```\n```\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n```\n', [("a", {})]),
    ("hermes", ' ```\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n ```\n', []),
    ("hermes", '```\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n', [("a", {})]),
    ("qwen_xml", "<tool_call><function= a ><parameter=x>\n\n1\n\n</parameter></function></tool_call>",
     [("a", {"x": "\n1\n"})]),
    ("qwen_xml", "<tool_call><function=a></function></tool_call>", [("a", {})]),
    ("qwen_xml", "<tool_call>x</tool_call>", ["no <function=name> ... </function> inside <tool_call>"]),
    ("qwen_xml", "<tool_call><function=a>x<parameter=x>1</parameter></function></tool_call>",
     ["text beside <parameter=name> ... </parameter>, or one that is not closed"]),
    ("glm", "<tool_call>a\n<arg_key> x </arg_key>\n<arg_value> 1 </arg_value></tool_call>", [("a", {"x": " 1 "})]),
    ("glm", "<tool_call> a </tool_call>", [("a", {})]),
    ("glm", "<tool_call></tool_call>", ["no name of a tool after <tool_call>"]),
    ("glm", "<tool_call>{a}</tool_call>", ["no name of a tool after <tool_call>"]),
    ("glm", "<tool_call><b></tool_call>", ["no name of a tool after <tool_call>"]),
    ("glm", "<tool_call>a <arg_key>x</arg_key></tool_call>",
     ["text beside <arg_key> ... </arg_key><arg_value> ... </arg_value>, or one that is not closed"]),
    ("deepseek", f'{OPEN}function<｜tool▁sep｜> a \n```json\n{{"x": 1}}\n```{CLOSE}', [("a", {"x": 1})]),
    ("deepseek", f'{OPEN} a <｜tool▁sep｜>{{"x": 1}}{CLOSE}', [("a", {"x": 1})]),
    ("deepseek", f"{OPEN}a{CLOSE}", ["no name and arguments around <｜tool▁sep｜>"]),
    ("deepseek", f"{OPEN}a<｜tool▁sep｜>[]{CLOSE}", ['"arguments" is not an object']),
    ("llama_json", ' {"name": "a", "parameters": {"x": 1}} ', [("a", {"x": 1})]),
    ("llama_json", '{"name": "a", "arguments": {"x": 1}}', [("a", {"x": 1})]),
    ("llama_json", '{"name": "a"}', ['"parameters" is not an object']),
    ("llama_json", '<|python_tag|> {"name": "a", "parameters": {}};{"type": "b", "name": "b", "parameters": {}}',
     [("a", {}), ("b", {})]),
    ("llama_json", '{ "function": "a", "name": "c", "parameters": {}}', [("c", {})]),
    ("llama_json", '{"other": "a"}', []),
    ("llama_json", "", []),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 2}}]',
     [("a", {}), ("b", {"x": 2})]),
    ("mistral", '[TOOL_CALLS] a [ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', [("a", {"x": 1}), ("b", {})]),
    ("mistral", "[TOOL_CALLS]a[ARGS][]", ['"arguments" is not an object']),
    ("mistral", "[TOOL_CALLS]5", ["no JSON list after [TOOL_CALLS]"]),
    ("mistral", "none", []),
]  # fmt: skip


def test_calls_are_read_as_they_are_written_and_what_is_none_says_why():
    def read(name: str, text: str) -> list[tuple[str, Mapping[str, Any]] | str]:
        return [(one.name, one.arguments) if one.error is None else one.error for one in SYNTAXES[name].read(text)]

    assert [(name, text, read(name, text)) for name, text, _ in CALLS] == CALLS


def test_calls_are_written_to_the_letter():
    arguments = {"code": 'print("ü")', "n": 1}
    assert {name: syntax.write("f", arguments) for name, syntax in SYNTAXES.items()} == {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"code": "print(\\"ü\\")", "n": 1}}\n</tool_call>',
        "qwen_xml": "<tool_call>\n<function=f>\n<parameter=code>\nprint(\"ü\")\n</parameter>\n<parameter=n>\n1\n"
                    "</parameter>\n</function>\n</tool_call>",
        "glm": "<tool_call>f\n<arg_key>code</arg_key>\n<arg_value>print(\"ü\")</arg_value>\n<arg_key>n</arg_key>\n"
               "<arg_value>1</arg_value>\n</tool_call>",
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
                    '{"code": "print(\\"ü\\")", "n": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "llama_json": '{"name": "f", "parameters": {"code": "print(\\"ü\\")", "n": 1}}',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"code": "print(\\"ü\\")", "n": 1}}]',
    }  # fmt: skip
    assert {name: syntax.typed for name, syntax in SYNTAXES.items()} == {
        "hermes": True, "qwen_xml": False, "glm": False, "deepseek": True, "llama_json": True, "mistral": True,
    }  # fmt: skip


ADD = ToolSpec(
    name="add", description="?", runs="actor",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "tools", "call"),
    [
        ("python", {"code": "1"}, [PYTHON_TOOL], ToolCall(code="1", tool="python")),
        ("python", {"code": "1", "input": "2", "x": 3}, [PYTHON_TOOL], ToolCall(code="1", stdin="2", tool="python")),
        ("python", {"code": 1}, [PYTHON_TOOL],
         ToolCall(tool="python", parse_error='"code" is missing or not a string')),
        ("python", {"code": "1", "input": 2}, [PYTHON_TOOL],
         ToolCall(tool="python", parse_error='"input" is not a string')),
        ("x" * 50, {}, [PYTHON_TOOL], ToolCall(parse_error=f"unknown tool {'x' * 40!r}; the tool is 'python'")),
        ("x", {}, [PYTHON_TOOL, ADD], ToolCall(parse_error="unknown tool 'x'; the tools are 'python', 'add'")),
        ("x", {}, [], ToolCall(parse_error="unknown tool 'x'; there is none")),
        ("add", {"a": 1}, [ADD], ToolCall(tool="add", arguments={"a": 1})),
    ],
)  # fmt: skip
def test_a_written_call_becomes_one_that_can_be_run(
    name: str, arguments: dict[str, Any], tools: Sequence[ToolSpec], call: ToolCall
):
    written = SYNTAXES["hermes"].write(name, arguments)
    assert parse_tool_calls(written, SYNTAXES["hermes"], {tool.name: tool for tool in tools}) == [call]


def test_arguments_in_text_get_the_types_of_the_tool_and_those_in_json_keep_theirs():
    tools = {"add": ADD}
    as_text, as_json = (SYNTAXES[name].write("add", {"a": "7"}) for name in ("glm", "hermes"))
    assert parse_tool_calls(as_text, SYNTAXES["glm"], tools) == [ToolCall(tool="add", arguments={"a": 7})]
    (refused,) = parse_tool_calls(as_json, SYNTAXES["hermes"], tools)
    assert refused.parse_error and refused.tool == "add"
    assert parse_tool_calls(SYNTAXES["hermes"].write("python", {"code": "1"})) == [ToolCall(code="1", tool="python")]
    (broken,) = parse_tool_calls("<tool_call>")
    assert broken == ToolCall(parse_error="<tool_call> without </tool_call>")


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


def test_what_may_be_a_marker_is_kept_back_for_as_long_as_it_may_be_one():
    marks = [("<a>", "</a>")]
    view = Streamed(Thought("<t>", "</t>"), inside=False, call_markers=marks)
    heard = [[(kind.value, text) for kind, text in view.feed(piece)] for piece in ("x<", "a", "y<", "t>z</", "t>w<")]
    assert heard == [
        [("said", "x")], [], [("said", "<ay")], [("thought", "z")], [("said", "w")]
    ]  # fmt: skip
    assert [text for _, text in view.end()] == ["<"] and list(view.end()) == []
    silent = Streamed(Thought("<t>", "</t>"), inside=False, call_markers=marks)
    assert [text for _, text in (*silent.feed("<a>b</"), *silent.feed("a>c"), *silent.end())] == ["c"]


# -- templates ---------------------------------------------------------------------------------------------------------


class Echo:
    """A tokenizer whose template writes what it is given."""

    def apply_chat_template(self, messages: Any, **given: Any) -> str:
        return json.dumps([messages, given])


KNOWS = TemplateFacts(
    has_system=True, shows_tools=True, writes_calls=True, has_tool_role=True, arguments_as_text=False,
    keeps_thoughts=True,
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {}}}}}


def written(messages: Sequence[Any], tools: Any = None, **knows: bool) -> list[Any]:
    renderer = Renderer(Echo(), replace(KNOWS, **knows), SYNTAXES["hermes"], THINK, switches={"thinking": True})
    content, given = json.loads(renderer.render(messages, tools, opens=True))
    shown = [TOOL] if tools and knows.get("shows_tools", True) else None
    assert given == {"tools": shown, "add_generation_prompt": True, "tokenize": False, "thinking": True}
    return content


def test_a_template_is_given_what_it_knows():
    user, system = {"role": "user", "content": "u"}, {"role": "system", "content": "s"}
    assistant = {"role": "assistant", "content": "c", "reasoning_content": "r"}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}] * 2
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    one, two = ({"role": "tool", "content": text} for text in "12")
    everything = [system, user, assistant, calling, one, two]
    named = [{"name": "f", **result} for result in (one, two)]
    assert written(everything, [TOOL]) == [*everything[:-2], *named]
    assert written([system, user], has_system=False) == [{"role": "user", "content": "s\n\nu"}]
    assert written([system, assistant], has_system=False)[0] == {"role": "user", "content": "s"}
    assert written([user, system], has_system=False) == [user, system]
    (thought,) = written([assistant], keeps_thoughts=False)
    assert thought == {"role": "assistant", "content": "<think>\nr\n</think>\n\nc"}
    text = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    assert written([calling], writes_calls=False) == [{"role": "assistant", "content": f"{text}\n{text}"}]
    (said,) = written([calling | {"content": "so"}], writes_calls=False)
    assert said["content"] == f"so\n{text}\n{text}"
    (as_text,) = written([calling], arguments_as_text=True)
    assert [call["function"] for call in as_text["tool_calls"]] == [{"name": "f", "arguments": '{"n": 1}'}] * 2
    told = [f"<tool_response>\n{number}\n</tool_response>" for number in (1, 2)]
    assert written([user, one, two, user, one], has_tool_role=False) == [
        user, {"role": "user", "content": "\n".join(told)}, user, {"role": "user", "content": told[0]},
    ]  # fmt: skip
    (shown, _) = written([user], [TOOL], shows_tools=False)
    wanted = f"# Tools\n\nYou may call these functions:\n<tools>\n{json.dumps(TOOL)}\n</tools>\n\nCall one like this:\n"
    example = '<tool_call>\n{"name": "name_of_the_function", "arguments": {"n": "..."}}\n</tool_call>'
    assert shown == {"role": "system", "content": wanted + example}
    assert written([system, user], [TOOL], shows_tools=False)[0]["content"] == f"s\n\n{wanted}{example}"


def test_words_are_framed_as_the_template_frames_them():
    assert Frame("", "").words(' a "b" ') == ' a "b" '
    assert Frame("", "", trims=True).words(" a ") == "a"
    assert Frame("", "", quotes=True).words(' ü"') == '" ü\\""'
    assert Frame("", "", trims=True, quotes=True).words(" a ") == '"a"'


def test_a_thinking_switch_has_two_names():
    assert thinking_switches("") == {}
    assert thinking_switches("on") == {"enable_thinking": True, "thinking": True}
    assert thinking_switches("off") == {"enable_thinking": False, "thinking": False}


# -- what does not fit -------------------------------------------------------------------------------------------------

QWEN = FAMILIES["qwen3"]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
OPENS = "{% if add_generation_prompt %}assistant:{% endif %}"
REFUSED: list[tuple[str, ChatChoices, str, str, str]] = [
    ("", ChatChoices(), "--chat.template", "the tokenizer has no chat template", "give one, a file in jinja"),
    ("{{ missing() }}", ChatChoices(), "--chat.template", "it cannot write a question (", "give another"),
    ("{# #}words", ChatChoices(), "--chat.template", "it leaves out what the user says", "give another"),
    (PLAIN, ChatChoices(), "--chat.template", "it writes nothing for `add_generation_prompt`",
     "let it open the assistant's turn"),
    (PLAIN + OPENS, ChatChoices(thinking="on"), "--chat.thinking", "the chat template has no switch for it",
     "leave it out, or give --chat.template"),
    (PLAIN.replace("<|im_end|>", ";") + OPENS, ChatChoices(), "--chat.stop",
     "the template ends an assistant's turn with ';user: and now;', which no single token of the tokenizer begins",
     "give the token that ends a turn, or the --chat.template that belongs to this tokenizer"),
    ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}" + OPENS, ChatChoices(),
     "--chat.template", "it leaves out what the assistant says", "give another"),
    (PLAIN + OPENS, ChatChoices(parser="best"), "--chat.parser", "'best' is no parser",
     f"choose {', '.join(SYNTAXES)} or vllm:<its name there>"),
    (PLAIN + OPENS, ChatChoices(stop=["a b"]), "--chat.stop", "'a b' is no single token of the tokenizer",
     "give one of its vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "choices", "field", "problem", "mend"), REFUSED)
def test_a_template_that_does_not_do_is_refused(
    template: str, choices: ChatChoices, field: str, problem: str, mend: str
):
    tokenizer = copy.copy(tokenizer_of(Family(template or "\n", "<|im_end|>", QWEN.special)))
    tokenizer.chat_template = tokenizer.chat_template.strip() or None
    with pytest.raises(ConfigError) as refused:
        resolve(tokenizer, {}, choices)
    error = refused.value
    assert (error.field, error.mend) == (field, mend) and error.problem.startswith(problem)


def test_a_template_without_tools_is_told_of_them_and_one_token_or_several_stop():
    tokenizer = tokenizer_of(Family(PLAIN + OPENS, "<|im_end|>", QWEN.special))
    profile = resolve(tokenizer, {"eos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>")}, ChatChoices())
    assert (profile.opening, profile.answer_end, profile.call_end) == ("assistant:", "<|im_end|>", "<|im_end|>")
    assert profile.template == replace(
        KNOWS, shows_tools=False, writes_calls=False, keeps_thoughts=False
    )  # fmt: skip
    assert {text for _, text in profile.stop_tokens} == {"<|endoftext|>", "<|im_end|>"}
    assert (profile.thinks, profile.has_thinking_switch, profile.prefill) == ("no", False, "")
    asked = resolve(tokenizer, {}, ChatChoices(parser="glm", stop=["<|im_start|>"], template_source="mine"))
    assert (asked.syntax, asked.template_source) == ("glm", "mine")
    assert {text for _, text in asked.stop_tokens} == {"<|im_end|>", "<|im_start|>"}
    assert resolve(tokenizer, {}, ChatChoices(parser="vllm:other")).syntax == "vllm:other"


def test_a_turn_is_read_without_the_token_that_ended_it():
    chat = chat_of(tokenizer_of(QWEN), instruct=False)
    ids = list(chat.tokenizer.encode("<think>a</think>b<|im_end|>", add_special_tokens=False))
    assert chat.read(ids, after_tools=False).text == "<think>a</think>b"
    assert chat.read(ids, after_tools=False).spoken == "b"
    assert chat.read([*ids, *ids[:1]], after_tools=False).text == "<think>a</think>b<|im_end|><think>"
    assert chat.read([], after_tools=True).text == ""
    assert chat.as_content(chat.read(ids, after_tools=False), after_tools=False) == "<think>a</think>b"
    opened = chat_of(tokenizer_of(FAMILIES["qwen3.5"]), instruct=False)
    reading = opened.read(list(opened.tokenizer.encode("a</think>b", add_special_tokens=False)), after_tools=False)
    assert (reading.spoken, opened.as_content(reading, after_tools=False)) == ("b", "<think>\na</think>b")


if __name__ == "__main__":
    WRITTEN.write_text(json.dumps({name: said_of(name) for name in FAMILIES}, indent=1, ensure_ascii=False) + "\n")
