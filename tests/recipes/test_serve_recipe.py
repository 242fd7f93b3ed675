"""The agent behind OpenAI's chat completions: what it answers, whom it lets in, and our own client."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from recipes import talker
from recipes.chat import ChatOptions, Screen, converse
from recipes.serve import ServeOptions, Server
from recipes.talker import TalkConfig, server_talker
from rstar_ray.agent.rollout import ExecuteFn
from rstar_ray.agent.talk import Heard, Message
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Sampling, ToolCall, ToolResult

OPTIONS = ServeOptions(model="m", allow_origin=("https://friend.example",))
QUESTION = {"messages": [{"role": "user", "content": "hi"}]}
HEARD = [
    Heard(kind="thought", text="hm"),
    Heard(kind="call", text="print(1)"),
    Heard(kind="result", text="1"),
    Heard(kind="said", text="It is "),
    Heard(kind="said", text="1."),
    Heard(kind="end", text="answered", num_tokens=7),
]


class FakeTalker:
    """Says the same to everybody."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[Message], int, Sampling | None]] = []

    async def answer(
        self, messages: Sequence[Message], *, max_tokens: int = 0, sampling: Sampling | None = None
    ) -> AsyncIterator[Heard]:
        self.asked.append((messages, max_tokens, sampling))
        if messages[-1]["content"] == "break":
            raise RStarError("the engine is gone")
        for one in HEARD:
            yield one


@asynccontextmanager
async def serving(fake: FakeTalker) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with TestServer(Server(fake, OPTIONS, "secret").app()) as server, aiohttp.ClientSession() as session:
        yield session, str(server.make_url("/v1"))


GOOD = {"Authorization": "Bearer secret"}


async def ask(body: Any, headers: dict[str, str] = GOOD, fake: FakeTalker | None = None) -> tuple[int, Any, Any]:
    async with serving(fake or FakeTalker()) as (session, url):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers}
        async with session.post(f"{url}/chat/completions", data=data, headers=sent) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text, response.headers


async def test_an_answer_has_what_was_said_apart_from_what_was_thought_and_run():
    fake = FakeTalker()
    status, answer, _ = await ask({**QUESTION, "max_tokens": 9, "temperature": 0.5}, fake=fake)
    assert (status, answer["object"], answer["model"]) == (200, "chat.completion", "m")
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is 1.", "stop")
    assert choice["message"]["reasoning_content"] == "hm\n```python\nprint(1)\n```\n```\n1\n```\n"
    assert answer["usage"]["completion_tokens"] == 7
    assert fake.asked[0][1:] == (9, Sampling(temperature=0.5))


async def test_a_stream_is_what_openais_clients_read():
    status, text, headers = await ask({**QUESTION, "stream": True})
    assert (status, headers["Content-Type"]) == (200, "text/event-stream")
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(event["delta"].get("content", "") for event in events) == "It is 1."
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["stop"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "the body is no JSON"),
        ([], "the body is no object"),
        ({"messages": "hi"}, "messages: messages is no JSON"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages: message 1 has the role 'alien'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages: the last one is to be the user's"),
        ({**QUESTION, "tools": [{}]}, "tools: the agent's own run inside"),
        ({**QUESTION, "n": 2}, "n: one answer at a time"),
        ({**QUESTION, "temperature": "hot"}, "temperature: 'hot' is not between 0 and 10"),
        ({**QUESTION, "max_tokens": -1}, "max_tokens: -1 is not between"),
    ],
)
async def test_a_request_that_cannot_be_answered_says_which_field(body: Any, problem: str):
    status, answer, _ = await ask(body)
    assert status == 400 and answer["error"]["message"].startswith(problem)


async def test_our_own_failure_is_no_answer():
    status, answer, _ = await ask({"messages": [{"role": "user", "content": "break"}]})
    assert (status, answer["error"]["message"]) == (500, "the engine is gone")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({**GOOD, "Host": "evil.example"}, 421),
        ({**GOOD, "Origin": "https://evil.example"}, 403),
        ({**GOOD, "Content-Type": "text/plain"}, 415),
        ({**GOOD, "Origin": "https://friend.example", "Sec-Fetch-Site": "cross-site"}, 200),
    ],
)
async def test_only_those_with_the_token_from_here_or_from_an_invited_page_are_let_in(
    headers: dict[str, str], status: int
):
    assert (await ask(QUESTION, headers))[0] == status


async def test_a_browser_of_an_invited_page_may_ask_first_and_another_may_not():
    async with serving(FakeTalker()) as (session, url):
        for origin, status in (("https://friend.example", 204), ("https://evil.example", 401)):
            async with session.options(f"{url}/chat/completions", headers={"Origin": origin}) as response:
                assert response.status == status
                assert response.headers.get("Access-Control-Allow-Origin") == (origin if status == 204 else None)


# ---------------------------------------------------------------- our client


@asynccontextmanager
async def no_sandbox() -> AsyncIterator[ExecuteFn]:
    async def execute(call: ToolCall) -> ToolResult:
        return ToolResult(outcome=Outcome.OK, text=f"ran {call.code}")

    yield execute


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talker, "sandbox_tool", no_sandbox)


def openai_like(turns: list[list[dict[str, Any]]], requests: list[Any]) -> web.Application:
    """A server that streams the deltas of its turns, and keeps what it was asked."""
    app = web.Application()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        requests.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for delta in turns[len(requests) - 1]:
            event = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", complete)])
    return app


CALL_DELTAS: list[dict[str, Any]] = [
    {"reasoning_content": "hm"},
    {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "python", "arguments": '{"code": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"1+1"}'}}]},
]


@pytest.mark.usefixtures("sandbox")
async def test_a_servers_calls_run_here_and_their_results_go_back():
    requests: list[Any] = []
    app = openai_like([CALL_DELTAS, [{"content": "It is "}, {"content": "2."}]], requests)
    async with TestServer(app) as server, server_talker(str(server.make_url("/")), "", TalkConfig()) as talk:
        heard = [one async for one in talk.answer([{"role": "user", "content": "1+1?"}])]
    assert [(one.kind, one.text) for one in heard] == [
        ("thought", "hm"), ("call", "1+1"), ("result", "ran 1+1"), ("said", "It is "), ("said", "2."),
        ("end", "answered"),
    ]  # fmt: skip
    assert requests[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "ran 1+1"}
    assert requests[0]["model"] == "served" and requests[0]["tools"][0]["function"]["name"] == "python"


@pytest.mark.usefixtures("sandbox")
async def test_a_call_of_a_server_that_cannot_be_read_is_told_back():
    bad = [{"tool_calls": [{"index": 0, "id": "c", "function": {"name": "bash", "arguments": "{}"}}]}]
    app = openai_like([bad, [{"content": "sorry"}]], [])
    async with TestServer(app) as server, server_talker(str(server.make_url("/")), "", TalkConfig()) as talk:
        heard = [one async for one in talk.answer([{"role": "user", "content": "x"}])]
    (result,) = [one for one in heard if one.kind == "result"]
    assert result.failed and "unknown tool 'bash'" in result.text


@pytest.mark.usefixtures("sandbox")
async def test_a_server_that_is_none_or_answers_something_else_is_refused():
    with pytest.raises(ConfigError, match=r"--server: http://127.0.0.1:9/v1 does not answer"):
        async with server_talker("http://127.0.0.1:9", "", TalkConfig()):
            pass
    async with TestServer(web.Application()) as server:
        with pytest.raises(ConfigError, match="names no model"):
            async with server_talker(str(server.make_url("/")), "", TalkConfig()):
                pass


async def test_a_question_is_answered_on_the_screen(capsys: pytest.CaptureFixture[str]):
    await converse(FakeTalker(), ChatOptions(model="m", prompt="1?"), Screen())
    said = capsys.readouterr().out
    assert said.startswith("hm\nprint(1)") and "─ result ─" in said and said.endswith("It is 1.\n")


def test_options_of_chat_and_serve_are_refused_with_the_mend():
    with pytest.raises(ConfigError, match="--model: one of --model and --server is needed"):
        ChatOptions()
    with pytest.raises(ConfigError, match="--port: 99999 is no port"):
        ServeOptions(model="m", port=99_999)
    with pytest.raises(ConfigError, match="--max-tokens: 0 is too small"):
        ChatOptions(model="m", max_tokens=0)
