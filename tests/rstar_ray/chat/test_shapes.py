"""Models of shapes that are seldom met are understood, or refused in one line with what to give."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken

from rstar_ray.chat.__main__ import main
from rstar_ray.chat.encoding import Encoder
from rstar_ray.chat.load_chat import configured_chat, load_chat
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig
from rstar_ray.data.conversation import conversation
from rstar_ray.data.sft import encode
from rstar_ray.errors import ConfigError
from rstar_ray.outcome import Outcome
from rstar_ray.tools.spec import PYTHON_TOOL
from rstar_ray.trajectory import Problem, ToolResult
from tests.rstar_ray.chat.shapes import SHAPES, WITHOUT_A_PARSER, shaped

PROBLEM = Problem(id="p", problem="What is 1+1?", answer="2")
CODE = 'print("<b> ünï")\nx = [1, 2]'
CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": CODE}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SYSTEM = {"role": "system", "content": "Be brief."}
SPACED = [name for name, shape in SHAPES.items() if shape.spaces]


def folder_of(name: str, path: Path) -> Path:
    shaped(name).save_pretrained(str(path))
    (path / "config.json").write_text(json.dumps({"vocab_size": 600}))
    return path


def chat_of_shape(name: str, path: Path) -> TokenizerChat:
    return load_chat(folder_of(name, path), ChatConfig(system="Be brief."), instruct=True)


def as_one_text(chat: TokenizerChat, text: str) -> list[int]:
    """As whoever serves the model encodes a whole conversation."""
    return list(chat.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("name", "syntax", "said"),
    [
        ("mistral", "mistral", ["tools             shown by the template", "note: the template requires call ids"]),
        ("mistral-args", "mistral", ["system text       in a separate turn", "note: the template requires call ids"]),
        ("llama-2", "hermes", ["results           in a message of the user", "a turn ends       ' </s>'"]),
        ("phi-4", "hermes", ["a turn begins     '<|assistant|>'", "tools             described in the system text"]),
        ("gemma-3", "hermes", ["a turn ends       '<end_of_turn>'"]),
        ("deepseek-3.1", "deepseek", ["reasoning         no: the prompt closes <think>", "--chat.thinking switches"]),
        ("no-system-no-tools", "hermes", ["system text       before the first question"]),
        ("names-the-tool", "hermes", ["results           as the template writes them"]),
        ("adds-bos", "hermes", ["note: the tokenizer begins texts with '<s>', the template does not"]),
        ("cohere", "hermes", ["system text       in a separate turn"]),
        ("lfm2", "hermes", ["tools             shown by the template", "written by rstar_ray"]),
        ("nemotron", "qwen_xml", ["reasoning         in <think>, which the prompt opens"]),
    ],
)
def test_a_shape_is_reported(
    name: str, syntax: str, said: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(folder_of(name, tmp_path))]) == 0
    printed = capsys.readouterr().out
    assert [line for line in [f"calls             {syntax},", *said] if line not in printed] == []
    assert "⟦" in printed and "note: SFT excludes" not in printed


@pytest.mark.parametrize("name", SHAPES)
def test_prompt_and_results_are_the_tokens_of_the_template_s_whole_text(name: str, tmp_path: Path):
    chat = chat_of_shape(name, tmp_path)
    tools = [PYTHON_TOOL.as_schema()]
    asked = [SYSTEM, {"role": "user", "content": PROBLEM.problem}]
    prompt = chat.renderer.render(asked, tools, opens=True)
    assert chat.prompt_ids(PROBLEM) == as_one_text(chat, prompt)
    results = [{"role": "tool", "content": text, "name": "python"} for text in ('2 "two"', "NameError\n  x")]
    whole = chat.renderer.render([*asked, CALLING, *results], tools, opens=True)
    answered = chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text=str(one["content"])) for one in results])
    ended = as_one_text(chat, chat.profile.call_end)[-1]
    assert as_one_text(chat, whole)[-len(answered) - 1 :] == [ended, *answered]


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_as_the_template_writes_it_is_read_back(name: str, tmp_path: Path):
    chat = chat_of_shape(name, tmp_path)
    before = chat.renderer.render([{"role": "user", "content": "q"}], None, opens=True)
    after = chat.renderer.render([{"role": "user", "content": "q"}, CALLING], None, opens=False)
    head = before.removesuffix(chat.profile.prefill)
    said = after[len(head) :].removeprefix(chat.profile.prefill)
    said = said[: said.find(chat.profile.call_end.strip())]
    if chat.profile.prefill and chat.profile.thought.closes not in said:
        said = chat.profile.thought.closes + said
    (call,) = chat.read(chat.encoder.encode(said, after=before), after_tools=False).calls
    assert (call.code, call.parse_error) == (CODE, None)


def test_a_model_whose_template_writes_no_calls_is_shown_one(tmp_path: Path):
    chat = chat_of_shape("lfm2", tmp_path)
    asked = chat.decode(chat.prompt_ids(PROBLEM))
    assert "<|tool_list_start|>" in asked and 'Call one like this:\n<tool_call>\n{"name": ' in asked


def test_a_model_with_tokens_for_calls_that_its_template_does_not_write_is_refused_with_vllm_s_parser(tmp_path: Path):
    tokenizer = copy.deepcopy(shaped("lfm2-v2"))
    tokenizer.chat_template = shaped("lfm2").chat_template
    with pytest.raises(ConfigError, match=r"--chat.parser: .* vllm:lfm2"):
        configured_chat(tokenizer, ChatConfig(), generation={}, instruct=True)
    assert configured_chat(tokenizer, ChatConfig(), generation={}, instruct=True, tools=())
    with_parser = configured_chat(tokenizer, ChatConfig(parser="vllm:lfm2"), generation={}, instruct=True)
    assert "Call one like this" not in with_parser.decode(with_parser.prompt_ids(PROBLEM))


def test_a_token_that_takes_the_blanks_after_it_takes_them_between_parts_too():
    tokenizer = copy.deepcopy(shaped("phi-4"))
    taking = AddedToken("<|done|>", rstrip=True, special=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [taking]})
    encoder = Encoder(tokenizer)
    parts = ("a<|done|>", "\n", " b\n")
    ids = [*encoder.encode(parts[0])]
    ids += [*encoder.encode(parts[1], after=parts[0]), *encoder.encode(parts[2], after=parts[0] + parts[1])]
    assert ids == list(tokenizer.encode("".join(parts), add_special_tokens=False))


@pytest.mark.parametrize("name", SPACED)
def test_a_trained_turn_is_the_tokens_that_follow_the_prompt(name: str, tmp_path: Path):
    chat = chat_of_shape(name, tmp_path)
    fields = {"messages": [SYSTEM, {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "a b"}]}
    (row,), problems = encode(chat, [conversation(fields, "x")], max_tokens=1_000)
    asked = chat.renderer.render(fields["messages"][:2], None, opens=True)
    said = chat.renderer.render(fields["messages"][1:], None, opens=False).rpartition("a b")[2]
    gap = " " if name in ("mistral", "llama-2") else ""
    end = as_one_text(chat, chat.profile.answer_end)[-1]
    ids = as_one_text(chat, f"{asked}{gap}a b{said}")
    assert not problems and list(row.token_ids) == ids[: len(ids) - ids[::-1].index(end)]
    assert (
        chat.decode([int(token) for token, on in zip(row.token_ids, row.loss_mask, strict=True) if on]).lstrip(" ")
        == "a b" + chat.profile.answer_end
    )


@pytest.mark.parametrize("name", SHAPES)
def test_there_is_one_beginning_whoever_adds_it(name: str, tmp_path: Path):
    chat = chat_of_shape(name, tmp_path)
    bos = chat.tokenizer.bos_token_id
    written = chat.renderer.render([{"role": "user", "content": "q"}], None, opens=True).count(
        chat.tokenizer.bos_token or "\0"
    )
    assert chat.prompt_ids(PROBLEM).count(bos) == written <= 1


@pytest.mark.parametrize("name", WITHOUT_A_PARSER)
def test_calls_that_nothing_reads_are_refused_with_vllm_s_parser_where_it_has_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, parser = WITHOUT_A_PARSER[name]
    assert main([str(folder_of(name, tmp_path))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --chat.parser: no parser reads the calls that this template writes ('")
    assert error.count("\n") == 1 and "probe_tool" in error
    assert error.endswith(f". Hint: vLLM has one: vllm:{parser}\n" if parser else "vLLM's tool parsers>\n")


def test_a_template_that_names_the_tool_in_its_results_names_the_one_there_is(tmp_path: Path):
    from dataclasses import replace

    chat = chat_of_shape("names-the-tool", tmp_path)
    answered = chat.decode(chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text="7")]))
    assert answered == "\n<|im_start|>tool python\n7<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(
        ConfigError, match=r"--chat.template: it names the tool in each result, and 2 are in use. Hint: use"
    ):
        load_chat(tmp_path, ChatConfig(), instruct=True, tools=[PYTHON_TOOL, replace(PYTHON_TOOL, name="other")])


def test_thoughts_where_the_prompt_closes_them_are_left_out_with_the_fix(tmp_path: Path):
    chat = chat_of_shape("deepseek-3.1", tmp_path)
    said = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    one = conversation({"messages": [{"role": "user", "content": "q"}, said]}, "x")
    _, (problem,) = encode(chat, [one], max_tokens=1_000)
    assert "message 2 thinks, where the prompt closes the thought (--chat.thinking on opens it)" in str(problem)


@pytest.mark.parametrize("name", SPACED)
def test_parts_of_a_text_are_the_tokens_that_they_are_in_it(name: str):
    encoder, tokenizer = Encoder(shaped(name)), shaped(name)
    special = tokenizer.eos_token
    parts = ["What is", " 1+1?", "\n\nis it", special, "What", " ", "", "ünï"]
    before = [""] + ["".join(parts[:end]) for end in range(1, len(parts))]
    ids = [token for piece in encoder.encode_all(parts, after=before) for token in piece]
    assert ids == list(tokenizer.encode("".join(parts), add_special_tokens=False))
    spelled = encoder.encode(special, after="What", plain=True)
    assert tokenizer.eos_token_id not in spelled and spelled
