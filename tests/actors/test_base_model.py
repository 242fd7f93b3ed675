"""A base model on vLLM: its tokenizer ends texts with one token, its template turns with another; both stop it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.generation.engine import Engine
from actors.generation.vllm_calls import VllmCalls
from rstar_ray.agent.rollout import RolloutState, run_rollout
from rstar_ray.chat.call_syntax import SYNTAXES, WrittenCall
from rstar_ray.chat.load_chat import load_chat, write_chat_files
from rstar_ray.config import ChatConfig
from rstar_ray.errors import ConfigError
from rstar_ray.trajectory import UNMODIFIED, Problem, RolloutLimits, RolloutRequest, StopReason, ToolCall, ToolResult
from tests import derived
from tests.rstar_ray.chat.families import FAMILIES, generation_of, tokenizer_of

pytestmark = pytest.mark.real
BASE = FAMILIES["qwen3-base"]


def base_model(folder: Path) -> Path:
    """Qwen3's architecture with random weights, Qwen's own template, and the files of a base checkpoint."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer_of(BASE)
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "pad_token_id": tokenizer.eos_token_id, "dtype": "float32",
    }  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    (folder / "generation_config.json").write_text(json.dumps(generation_of(BASE)))
    return folder


def request(number: int) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=f"r{number}",
        group_id="g",
        problem=Problem(id="p", problem="What is 1+1?", answer="2"),
        seed=number,
        limits=RolloutLimits(max_response_tokens=700, max_turns=2, max_context_tokens=2_000, max_calls_per_turn=16),
        sampling=UNMODIFIED,
    )


async def no_tool(call: ToolCall) -> ToolResult:
    raise AssertionError(f"random bytes made a call: {call}")


async def test_rollouts_of_a_base_model_end_with_their_turns(tmp_path: Path):
    chat = load_chat(base_model(tmp_path), ChatConfig(), instruct=True)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [256]}
    stops = dict(chat.profile.stop_tokens)
    assert set(stops.values()) == {"<|endoftext|>", "<|im_end|>"}
    settings = derived.engine(max_context_tokens=2048, kv_tokens=64_000)
    engine = Engine(settings, tmp_path, stop_token_ids=chat.profile.stop_token_ids)
    await engine.start()
    try:
        prompt = chat.prompt_ids(request(0).problem)
        states = [RolloutState.start(request(number), prompt) for number in range(24)]
        played = await asyncio.gather(
            *(run_rollout(state, generate=engine.generate, execute=no_tool, chat=chat) for state in states)
        )
    finally:
        await engine.close()
    ended = [state for state in played if state.stop_reason is StopReason.ANSWERED]
    ends = {stops[state.response_ids[-1]] for state in ended}
    assert ends == set(stops.values())  # of 24 turns of up to 700 tokens of 270, both come
    for state in played:
        assert not set(state.response_ids[:-1]) & set(stops)
        assert not state.final_text.endswith("<|im_end|>")
    write_chat_files(tmp_path, chat)
    exported = json.loads((tmp_path / "generation_config.json").read_text())
    assert set(exported["eos_token_id"]) == set(stops)


VLLM_NAMES = {
    "hermes": "hermes", "qwen_xml": "qwen3_coder", "llama_json": "llama3_json", "glm": "glm45",
    "deepseek": "deepseek_v3",
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
    }
]
ARGUMENTS: Sequence[dict[str, Any]] = ({"code": 'print("a")\nx = [1]'}, {"code": "1"}, {"code": 'ünï \\ "q"'})
SPECIAL = tuple(dict.fromkeys(token for family in FAMILIES.values() for token in (*family.special, *family.tags)))


@pytest.mark.parametrize("name", VLLM_NAMES)
def test_vllms_parser_reads_what_ours_does(name: str):
    tokenizer = tokenizer_of(replace(BASE, special=SPECIAL, tags=()))
    theirs, ours = VllmCalls(VLLM_NAMES[name], tokenizer, TOOLS), SYNTAXES[name]
    for arguments in ARGUMENTS:
        text = ours.write("python", arguments)
        assert theirs.read(text) == [WrittenCall("python", arguments)] == ours.read(text)
    assert theirs.read("no call") == []


def test_vllms_parser_reads_the_tools_of_a_request():
    width = {"type": "object", "properties": {"width": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "plot", "parameters": width}}]
    text = "<seed:tool_call><function=plot><parameter=width>3</parameter></function></seed:tool_call>"
    tokenizer = tokenizer_of(replace(BASE, special=(*BASE.special, "<seed:tool_call>", "</seed:tool_call>")))
    tools[0]["function"] |= {"description": ["odd"], "strict": "perhaps"}
    ours = VllmCalls("seed_oss", tokenizer, TOOLS)
    assert ours.for_tools(tools).read(text) == [WrittenCall("plot", {"width": 3})]
    assert ours.read(text) != [WrittenCall("plot", {"width": 3})]


def test_what_vllms_parser_cannot_read_is_still_a_call_and_an_unknown_parser_is_refused():
    (call,) = VllmCalls("hermes", tokenizer_of(BASE), TOOLS).read("<tool_call>nonsense</tool_call>")
    assert call.error == "vllm:hermes cannot read what follows <tool_call>"
    for name, opens, body in (
        ("internlm", "<|action_start|>", '<|plugin|>{"name": "f", "parameters": {"a": }}<|action_end|>'),
        ("internlm", "<|action_start|>", "<|plugin|>{}<|action_end|>"),
        ("phi4_mini_json", "functools", '[{"name": "f", "arguments": {"a": }}]'),
        ("hunyuan_a13b", "<tool_calls>", '[{"name": "f", "arguments": {"a": }}]</tool_calls>'),
    ):
        (call,) = VllmCalls(name, tokenizer_of(BASE), TOOLS).read(opens + body)
        assert call.error and f"vllm:{name} cannot read what follows {opens}" in call.error
    with pytest.raises(ConfigError, match=r"--chat\.parser: vLLM has no tool parser 'best'"):
        VllmCalls("best", tokenizer_of(BASE), TOOLS)
    with pytest.raises(ConfigError, match=r"--chat\.parser: vLLM's tool parser 'openai' cannot be used"):
        VllmCalls("openai", tokenizer_of(BASE), TOOLS)
