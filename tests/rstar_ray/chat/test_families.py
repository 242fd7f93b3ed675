"""Chat models of many families, by their real templates: how turns end, what stops, how calls are written and read."""

from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from rstar_ray.chat.resolve import resolve
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig
from rstar_ray.errors import ConfigError
from rstar_ray.outcome import Outcome
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec
from rstar_ray.trajectory import Problem, ToolResult
from tests.rstar_ray.chat.families import FAMILIES, generation_of, tokenizer_of

CODE = 'print("<b> ünï")\nx = [1, 2]'
TOOL = "python_code_with_standard_io"
PYTHON_AS = replace(PYTHON_TOOL, name=TOOL)


def chat_of_family(name: str, *, choices: ChatConfig | None = None, shows_tool: bool = True) -> TokenizerChat:
    family = FAMILIES[name]
    tokenizer, choices = tokenizer_of(family), choices or ChatConfig()
    profile = resolve(tokenizer, generation_of(family), choices)
    return TokenizerChat(
        tokenizer, profile, shows_tools=shows_tool, tools=[PYTHON_AS], system="Be brief.", thinking=choices.thinking
    )


def ids_of(chat: TokenizerChat, text: str) -> list[int]:
    return list(chat.tokenizer.encode(text, add_special_tokens=False))


def calling(code: str = CODE) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"code": code}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("name", "syntax", "turn_end", "thinks"),
    [
        ("qwen2.5", "hermes", "<|im_end|>", "no"),
        ("qwen3-base", "hermes", "<|im_end|>", "may"),
        ("qwen3", "hermes", "<|im_end|>", "may"),
        ("qwen3-instruct", "hermes", "<|im_end|>", "may"),
        ("qwen3.5", "qwen_xml", "<|im_end|>", "prefilled"),
        ("qwen3.6", "qwen_xml", "<|im_end|>", "prefilled"),
        ("llama3", "hermes", "<|eot_id|>", "no"),
        ("llama3.1", "llama_json", "<|eot_id|>", "no"),
        ("r1-distill", "hermes", "<｜end▁of▁sentence｜>", "prefilled"),
        ("deepseek-v3", "deepseek", "<｜end▁of▁sentence｜>", "prefilled"),
        ("glm4.5", "glm", "<|user|>", "may"),
        ("gemma", "hermes", "<end_of_turn>", "no"),
        ("rstar2", "hermes", "<|im_end|>", "prefilled"),
    ],
)
def test_a_family_is_resolved_from_its_files(name: str, syntax: str, turn_end: str, thinks: str):
    profile = chat_of_family(name).profile
    assert (profile.syntax, profile.answer_end.strip(), profile.thinks) == (syntax, turn_end, thinks)


def test_a_base_model_stops_at_the_end_of_its_turns_as_well_as_at_its_own_end():
    profile = chat_of_family("qwen3-base").profile
    assert {text for _, text in profile.stop_tokens} == {"<|endoftext|>", "<|im_end|>"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_as_the_template_writes_it_is_read_back(name: str):
    chat = chat_of_family(name)
    question = {"role": "user", "content": "q"}
    before = chat.renderer.render([question], None, opens=True)
    after = chat.renderer.render([question, calling()], None, opens=False)
    head = before.removesuffix(chat.profile.prefill)
    assert after.startswith(head)
    said = after[len(head) :].removeprefix(chat.profile.prefill)
    if chat.profile.prefill and chat.profile.thought.closes not in said and not chat.profile.thought.holds_calls:
        said = f"so\n{chat.profile.thought.closes}\n\n{said}"  # of these templates, none writes what the model thought
    end = said.find(chat.profile.call_end)
    said = said[:end] if end >= 0 else said
    reading = chat.read(ids_of(chat, said + chat.profile.call_end), after_tools=False)
    (call,) = reading.calls
    assert (call.code, call.parse_error) == (CODE, None)


PLOT = ToolSpec(
    name="plot",
    description="?",
    parameters={
        "type": "object",
        "properties": {
            "title": {"type": "string"}, "width": {"type": "integer"}, "grid": {"type": "boolean"},
            "points": {"type": "array"}, "style": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "scale": {"type": "number"},
        },
        "required": ["title", "width", "points"],
    },
    runs="actor",
)  # fmt: skip
PLOTTED = {"title": "12", "width": 3, "grid": True, "points": [1, "a", None], "style": {"a": [1]}, "scale": 0.5}


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "qwen3.6", "glm4.5"])
def test_arguments_that_a_template_writes_as_text_come_back_in_the_types_of_the_tools_schema(name: str):
    family = FAMILIES[name]
    chat = TokenizerChat(
        tokenizer_of(family), resolve(tokenizer_of(family), generation_of(family), ChatConfig()), tools=[PLOT]
    )
    call = {"type": "function", "function": {"name": "plot", "arguments": PLOTTED}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
    ]
    written = chat.renderer.render(messages, None, opens=False)
    said = written[written.index("<tool_call>") :]
    opened = f"so\n{chat.profile.thought.closes}\n\n" if chat.profile.prefill else ""
    (read,) = chat.read(ids_of(chat, opened + said[: said.index(chat.profile.call_end)]), after_tools=False).calls
    assert (read.tool, read.parse_error) == ("plot", None)
    assert read.arguments == PLOTTED and [type(v) for v in read.arguments.values()] == list(map(type, PLOTTED.values()))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
def test_prompt_and_results_are_the_tokens_that_the_template_writes(name: str):
    chat = chat_of_family(name)
    profile = chat.profile
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+1?"}]
    tools = chat._schemas  # pyright: ignore[reportPrivateUsage]
    problem = Problem(id="p", problem="What is 1+1?", answer="2")
    assert chat.decode(chat.prompt_ids(problem)) == chat.renderer.render(messages, tools, opens=True)
    results = [{"role": "tool", "content": text} for text in ('2 "two"', "NameError\n  x")]
    whole = chat.renderer.render([*messages, calling(), *results], tools, opens=True)
    answered = chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text=str(one["content"])) for one in results])
    assert whole.endswith(profile.call_end + chat.decode(answered))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_tool_prints_never_becomes_a_control_token(name: str):
    chat = chat_of_family(name)
    spelled = chat.profile.call_end + "".join(FAMILIES[name].special)
    plain = chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text="x")])
    spelling = chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text=spelled)])
    control = {chat.tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[name].special}
    assert [one for one in spelling if one in control] == [one for one in plain if one in control]


@pytest.mark.parametrize("name", FAMILIES)
def test_half_a_surrogate_pair_in_a_result_is_a_replaced_character(name: str):
    chat = chat_of_family(name)
    halves, replaced = (ToolResult(outcome=Outcome.OK, text=f"no {what} here") for what in ("\ud83d", "?"))
    assert chat.tool_answer_ids([halves]) == chat.tool_answer_ids([replaced])


def test_call_markers_that_are_special_tokens_are_seen():
    chat = chat_of_family("hermes-special")
    text = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"code": "1"}}}}\n</tool_call><|im_end|>'
    ids = ids_of(chat, text)
    assert "tool_call" not in chat.tokenizer.decode(ids, skip_special_tokens=True)
    assert [call.code for call in chat.read(ids, after_tools=False).calls] == ["1"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "r1-distill"])
def test_calls_and_answers_inside_a_thought_do_not_count(name: str):
    chat = chat_of_family(name)
    call = chat.syntax.write(TOOL, {"code": "1"})
    opens = "" if chat.profile.prefill else "<think>\n"
    thought = chat.read(ids_of(chat, f"{opens}{call} <answer>1</answer>\n</think>\nno"), after_tools=False)
    assert (thought.calls, thought.spoken.strip()) == ((), "no")
    endless = chat.read(ids_of(chat, f"{opens}{call} <answer>1</answer>"), after_tools=False)
    assert (endless.calls, endless.spoken) == ((), "")
    said = chat.read(ids_of(chat, f"{opens}x</think>\n{call}"), after_tools=False)
    assert [one.code for one in said.calls] == ["1"]


def test_the_reason_of_rstar2_holds_its_calls_but_not_its_answer():
    chat = chat_of_family("rstar2")
    assert chat.profile.prefill == "<reason>"
    call = chat.syntax.write(TOOL, {"code": "1"})
    working = chat.read(ids_of(chat, f"let me see <answer>0</answer>\n{call}<|im_end|>"), after_tools=False)
    assert [one.code for one in working.calls] == ["1"]
    unclosed = chat.read(ids_of(chat, "so it is <answer>5</answer><|im_end|>"), after_tools=False)
    assert unclosed.spoken == "<answer>5</answer>"  # as the released code judges it
    done = chat.read(ids_of(chat, "<answer>0</answer></reason><answer>1</answer><|im_end|>"), after_tools=True)
    assert (done.calls, done.spoken) == ((), "<answer>1</answer>")
    answered = chat.decode(chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text="7")]))
    assert answered == "\n<|im_start|>user\n<tool_response>7</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>"


def test_thinking_is_switched_where_the_template_has_a_switch():
    off = chat_of_family("qwen3", choices=ChatConfig(thinking="off"))
    prompt = off.decode(off.prompt_ids(Problem(id="p", problem="q", answer="")))
    assert prompt.endswith("<think>\n\n</think>\n\n") and off.profile.thinks == "off"
    with pytest.raises(ConfigError, match=r"--chat.thinking: .* no switch .* Hint: leave it out"):
        chat_of_family("qwen2.5", choices=ChatConfig(thinking="on"))


def test_of_several_templates_the_one_for_tools_is_taken_and_leaves_with_the_policy():
    tokenizer = copy(tokenizer_of(FAMILIES["qwen3"]))
    own = tokenizer.chat_template
    for named in ({"default": "no tools", "tool_use": own}, {"rag": "documents", "default": own}):
        tokenizer.chat_template = named
        resolve(tokenizer, {}, ChatConfig())
        assert tokenizer.chat_template == own
    tokenizer.chat_template = {"rag": "documents"}
    with pytest.raises(
        ConfigError, match=r"--chat.template: the tokenizer has the templates rag, and none .*. Hint: give"
    ):
        resolve(tokenizer, {}, ChatConfig())
