"""Anthropic's Messages by a policy, asked through HTTP by the unmodified `anthropic` client; the engine is scripted."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from tests.actors.test_policy_answers import CONTEXT, THOUGHT, Script, server_of
from tests.rstar_ray.test_token_lines import CALL, CHATS, QUERY

TOOLS: Any = [
    {"name": "search", "description": "Finds.", "input_schema": QUERY},
    {"name": "look_up", "input_schema": QUERY},
]
ASKED: Any = {
    "model": "policy",
    "max_tokens": 400,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Who?"}],
}
CALLING = f"{THOUGHT}I look.\n{CALL}\n{CALL}<|im_end|>"


@asynccontextmanager
async def client_of(*turns: str) -> AsyncGenerator[tuple[anthropic.AsyncAnthropic, Script], None]:
    async with (
        server_of(*turns) as (url, script),
        anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0) as client,
    ):
        yield client, script


def results_of(message: Any) -> list[Any]:
    calls = [block for block in message.content if block.type == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": "Bob"} for call in reversed(calls)]
    blocks[0] |= {"content": [{"type": "text", "text": "Bob"}], "is_error": True}
    return [*blocks, {"type": "text", "text": "And?"}]


async def test_an_agents_loop_is_sampled_from_the_tokens_of_its_turns():
    async with client_of(CALLING, f"{THOUGHT}Bob.<|im_end|>") as (client, script):
        first = await client.messages.create(**ASKED, tools=TOOLS)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (first.stop_reason, first.content[-1].input) == ("tool_use", {"query": "a"})
        said = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
        messages = [*ASKED["messages"], said, {"role": "user", "content": results_of(first)}]
        last = await client.messages.create(**{**ASKED, "messages": messages}, tools=TOOLS)
    assert (last.content[-1].text, last.stop_reason) == ("Bob.", "end_turn")
    line = [*script.prompts[0], *script.sampled[0]]
    assert script.prompts[1][: len(line)] == line
    new = CHATS["qwen3"].decode(script.prompts[1][len(line) :])
    assert new.count("<tool_response>\nBob") == 2 and "And?" in new
    assert (last.usage.input_tokens, last.usage.output_tokens) == (len(script.prompts[1]), len(script.sampled[1]))


async def test_both_dialects_show_the_policy_the_same_tokens():
    async with server_of("Yes.<|im_end|>", "Yes.<|im_end|>") as (url, script):
        async with anthropic.AsyncAnthropic(base_url=url, api_key="secret") as client:
            await client.messages.create(**ASKED, tools=TOOLS)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            functions: Any = [
                {"name": tool["name"], "parameters": QUERY}
                | ({"description": tool["description"]} if "description" in tool else {})
                for tool in TOOLS
            ]
            await client.chat.completions.create(
                model="m",
                messages=[{"role": "system", "content": "Be brief."}, *ASKED["messages"]],
                tools=[{"type": "function", "function": function} for function in functions],
            )
    assert len(script.prompts) == 2
    decoded = [CHATS["qwen3"].decode(prompt) for prompt in script.prompts]
    assert [text.count('"search"') for text in decoded] == [1, 1]
    assert decoded[0].partition("# Tools")[0] == decoded[1].partition("# Tools")[0]
    assert decoded[0].rpartition("</tools>")[2] == decoded[1].rpartition("</tools>")[2]


async def test_a_stream_has_real_deltas_and_the_same_message():
    async with client_of(CALLING, CALLING) as (client, script):
        whole = await client.messages.create(**ASKED, tools=TOOLS)
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()

    def without_ids(message: Any) -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id"}) for block in message.content]

    assert without_ids(streamed) == without_ids(whole)
    assert kinds.count("text") > 1 and kinds.count("content_block_stop") == 4
    assert streamed.stop_reason == "tool_use"
    assert (streamed.usage.input_tokens, streamed.usage.output_tokens) == (
        len(script.prompts[1]),
        len(script.sampled[1]),
    )


async def test_errors_of_calls_that_cannot_be_parsed_come_with_the_message():
    async with client_of(*["<tool_call>\n{broken\n</tool_call><|im_end|>"] * 2) as (client, _):
        whole = await client.messages.create(**ASKED, tools=TOOLS)
        events = [event async for event in await client.messages.create(**ASKED, tools=TOOLS, stream=True)]
    (end,) = [event for event in events if event.type == "message_delta"]
    (error,) = (whole.model_extra or {})["rstar_unreadable"]
    assert error and (end.delta.model_extra or {})["rstar_unreadable"] == [error]


async def test_a_stop_sequence_and_the_budget_end_a_turn_by_name():
    async with client_of("So.\nObservation: 3<|im_end|>", "It is very long.<|im_end|>") as (client, _):
        stopped = await client.messages.create(**ASKED, stop_sequences=["Obs", "never"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Obs")
        cut = await client.messages.create(**{**ASKED, "max_tokens": 3})
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"max_tokens": None}, 400, "max_tokens: it is required"),
        ({"max_tokens": "many"}, 400, "max_tokens: must be between"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages: message 1 (user) has a part 'image'"),
        ({"messages": [{"role": "user", "content": [1]}]}, 400, "messages: message 1, content: must be a list"),
        ({"messages": [{"role": "user"}]}, 400, "messages: message 1, content: must be a list"),
        ({"messages": "hi"}, 400, "messages: must be a list"),
        ({"messages": [{"role": "alien", "content": "x"}]}, 400, "messages: message 2 has the role 'alien'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}, 400, "messages: message 1 has a part"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "tools: 'web_search_20250305'"),
        ({"tools": [{"name": 3}]}, 400, "tools: each must be a function"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice: only auto and none"),
        ({"tool_choice": 3}, 400, "tool_choice: must be an object"),
        ({"mcp_servers": [{"url": "http://x"}]}, 400, "mcp_servers: not supported"),
        ({"top_k": 3}, 400, "top_k: not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format: not supported"),
        ({"output_config": "low"}, 400, "output_config: must be an object"),
        ({"output_format": {"type": "json_schema"}}, 400, "output_format: not supported"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs: not supported"),
        ({"model": "claude"}, 404, "model: 'claude' is not served here"),
        ({"model": 3}, 400, "model: must be a string"),
        ({"messages": [{"role": "user", "content": "x " * 3 * CONTEXT}]}, 400, "prompt is too long: the messages are"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_an_error_of_this_dialect(
    fields: dict[str, Any], status: int, said: str
):
    async with server_of() as (url, _), aiohttp.ClientSession() as session:
        body = json.dumps({**ASKED, **fields})
        headers = {"x-api-key": "secret", "Content-Type": "application/json"}
        async with session.post(f"{url}/v1/messages", data=body, headers=headers) as answer:
            error = await answer.json()
    assert answer.status == status and error["error"]["message"].startswith(said)
    assert (error["type"], error["error"]["type"]) == (
        "error",
        "invalid_request_error" if status == 400 else "not_found_error",
    )


async def test_errors_are_the_clients_own_kinds():
    async with server_of() as (url, _):
        async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**ASKED)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.count_tokens(model="m", messages=ASKED["messages"])
            with pytest.raises(anthropic.APIStatusError) as large:
                await client.messages.create(**{**ASKED, "system": "x" * 10_000_000})
            assert (large.value.status_code, large.value.body["error"]["type"]) == (413, "request_too_large")  # type: ignore
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="is not served here"):
                await client.chat.completions.create(model="gpt", messages=ASKED["messages"])


async def test_a_stream_that_is_closed_early_leaves_the_next_request_alone():
    async with client_of("It is a very long story." * 20, "Yes.<|im_end|>") as (client, script):
        stream = await client.messages.create(**ASKED, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
        assert (await client.messages.create(**ASKED)).content[0].text == "Yes."  # type: ignore
    assert len(script.prompts) == 2
