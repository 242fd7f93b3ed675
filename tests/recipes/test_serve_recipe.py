"""The agent behind OpenAI's chat completions: what it answers, whom it lets in, and our own client."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray
from aiohttp import web
from aiohttp.test_utils import TestServer

from actors.talk import talker
from actors.talk.talk_tools import AnswerTools, TalkTools, begun, talk_tools
from actors.talk.talker import TalkConfig, server_talker
from recipes import serve as serve_recipe
from recipes.chat import ChatOptions, Screen, converse
from recipes.serve import AgentAnswers, ServeOptions, Server
from rstar_ray.agent.talk import Message, TalkEvent, as_written
from rstar_ray.chat.instructions import instructions
from rstar_ray.config import ChatConfig, ToolsConfig
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.outcome import Outcome
from rstar_ray.tools.loader import tool_specs
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec
from rstar_ray.trajectory import UNMODIFIED, Sampling, ToolCall, ToolResult

OPTIONS = ServeOptions(model="m", allow_origin=("https://friend.example",))
QUESTION = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "search"}}
HEARD = [
    TalkEvent(kind="thought", text="hm"),
    TalkEvent(kind="call", text="print(1)"),
    TalkEvent(kind="result", text="1"),
    TalkEvent(kind="said", text="It is "),
    TalkEvent(kind="said", text="1."),
    TalkEvent(kind="end", text="answered", prompt_tokens=5, num_tokens=7),
]


class FakeTalker:
    """Says the same to everybody."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[Message], int, Sampling | None]] = []

    async def answer(
        self, messages: Sequence[Message], *, max_tokens: int = 0, sampling: Sampling | None = None
    ) -> AsyncIterator[TalkEvent]:
        self.asked.append((messages, max_tokens, sampling))
        if messages[-1]["content"] == "break":
            raise RStarError("the engine is gone")
        for one in HEARD:
            yield one


@asynccontextmanager
async def serving(fake: FakeTalker) -> AsyncGenerator[tuple[aiohttp.ClientSession, str]]:
    async with (
        TestServer(Server(AgentAnswers(fake, UNMODIFIED), OPTIONS, "secret").app()) as server,
        aiohttp.ClientSession() as session,
    ):
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
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    assert fake.asked[0][1:] == (9, Sampling(temperature=0.5, top_p=1.0))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "the body is not valid JSON"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages: message 1 has the role 'alien'"),
        (
            {"messages": [*QUESTION["messages"], {"role": "tool", "content": "x"}]},
            "messages: with --run-tools the last",
        ),
        ({**QUESTION, "tools": [TOOL]}, "tools: not with --run-tools"),
        ({**QUESTION, "stop": ["END"]}, "stop: not with --run-tools"),
        ({**QUESTION, "logprobs": True}, "logprobs: not with --run-tools"),
    ],
)
async def test_a_request_that_cannot_be_answered_says_which_field(body: Any, problem: str):
    status, answer, _ = await ask(body)
    assert status == 400 and answer["error"]["message"].startswith(problem)


async def test_our_own_failure_is_not_an_answer():
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
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "secret", "Authorization": "Bearer wrong"}, 401),
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


async def test_a_page_that_is_invited_may_send_every_header_of_an_sdk():
    wanted = "authorization,content-type,x-stainless-lang,anthropic-dangerous-direct-browser-access"
    headers = {"Origin": "https://friend.example", "Access-Control-Request-Headers": wanted}
    async with (
        serving(FakeTalker()) as (session, url),
        session.options(f"{url}/chat/completions", headers=headers) as response,
    ):
        assert response.headers["Access-Control-Allow-Headers"] == wanted
        assert "Access-Control-Request-Headers" in response.headers["Vary"]


# ---------------------------------------------------------------- our client


class RanTools:
    """Of one answer."""

    closed = 0

    async def execute(self, call: ToolCall) -> ToolResult:
        return ToolResult(outcome=Outcome.OK, text=f"ran {as_written(call)}")

    def close(self) -> None:
        RanTools.closed += 1


@asynccontextmanager
async def no_sandbox(specs: Sequence[ToolSpec], config: ToolsConfig, folder: str) -> AsyncGenerator[TalkTools]:
    yield TalkTools(specs=specs, open=lambda state: RanTools())


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talker, "talk_tools", no_sandbox)
    RanTools.closed = 0


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


SEARCH = """
from rstar_ray.tools.tool import Tool

ONE = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}

async def find(query: str) -> str:
    return query.upper()

class Count:
    def __init__(self, problem, snapshot):
        self.calls, self.question = 0, problem.problem
    async def call(self, query: str) -> str:
        self.calls += 1
        return f"{self.question} {query} {self.calls}"

search = Tool(name="search", description="Finds.", parameters=ONE, function=find)
twice = "import json; print(json.load(open(0))['query'] * 2)"
sandboxed = Tool(name="sandboxed", description="?", parameters=ONE, program=twice)
count = Tool(name="count", description="?", parameters=ONE, state=Count)
all_of_them = [search, sandboxed, count]
"""
CALL_DELTAS: list[dict[str, Any]] = [
    {"reasoning_content": "hm"},
    {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "python", "arguments": '{"code": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"1+1"}'}}]},
]


@pytest.mark.usefixtures("sandbox")
async def test_a_server_receives_the_prompts_of_training():
    requests: list[Any] = []
    app = openai_like([[{"content": "2"}]] * 4, requests)
    question = {"role": "user", "content": "1+1?"}
    configs = [
        TalkConfig(),
        TalkConfig(chat=ChatConfig(system="Be brief.", before="Think: ", thinking="on")),
        TalkConfig(chat=ChatConfig(system="none", thinking="off")),
        TalkConfig(chat=ChatConfig(protocol="rstar2-agent-14b")),
    ]
    async with TestServer(app) as server:
        for config in configs:
            async with server_talker(str(server.make_url("/")), "", config) as talk:
                _ = [one async for one in talk.answer([question])]
    plain, chosen, bare, published = requests
    assert plain["messages"] == [{"role": "system", "content": instructions([PYTHON_TOOL])}, question]
    assert chosen["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Think: 1+1?"}
    ]  # fmt: skip
    assert bare["messages"] == [question]
    (asked,) = published["messages"]
    assert asked["content"].endswith("This is the problem:\n1+1?")
    assert published["tools"][0]["function"]["name"] == "python_code_with_standard_io"
    assert "chat_template_kwargs" not in plain
    assert chosen["chat_template_kwargs"]["enable_thinking"] and not bare["chat_template_kwargs"]["enable_thinking"]


@pytest.mark.usefixtures("sandbox")
async def test_a_server_may_send_so_much_of_an_answer_and_not_of_each_turn():
    requests: list[Any] = []
    app = openai_like([CALL_DELTAS, CALL_DELTAS[1:], CALL_DELTAS], requests)
    config = TalkConfig(max_tokens=len(CALL_DELTAS) + 2)
    async with TestServer(app) as server, server_talker(str(server.make_url("/")), "", config) as talk:
        heard = [one async for one in talk.answer([{"role": "user", "content": "1+1?"}])]
    assert [asked["max_tokens"] for asked in requests] == [5, 2]
    assert (heard[-1].text, heard[-1].num_tokens) == ("truncated", 5)


async def test_an_address_that_is_taken_is_refused_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch):
    def starts(model: str, *given: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(serve_recipe, "own_engine", starts)
    async with TestServer(web.Application()) as there:
        with pytest.raises(ConfigError, match=rf"--port: 127.0.0.1:{there.port} cannot be used"):
            await serve_recipe.serve(ServeOptions(model="m", port=there.port or 0))
    with pytest.raises(ConfigError, match=r"--port: no\.such\.host\.invalid:0 cannot be used"):
        await serve_recipe.serve(ServeOptions(model="m", host="no.such.host.invalid", port=0))
    with pytest.raises(AssertionError, match="an engine was started"):
        await serve_recipe.serve(ServeOptions(model="m", port=0))


@pytest.mark.usefixtures("sandbox")
async def test_custom_tools_are_sent_to_a_server_and_called(tmp_path: Path):
    (tmp_path / "mine.py").write_text(SEARCH)
    asks = [{"tool_calls": [{"index": 0, "id": "c", "function": {"name": "search", "arguments": '{"query": "a"}'}}]}]
    requests: list[Any] = []
    app = openai_like([asks, [{"content": "found"}]], requests)
    config = TalkConfig(own_folder=str(tmp_path), tools=ToolsConfig(use=("python", "mine:search")))
    async with TestServer(app) as server, server_talker(str(server.make_url("/")), "", config) as talk:
        heard = [one async for one in talk.answer([{"role": "user", "content": "x"}])]
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["python", "search"]
    assert [one.text for one in heard[:2]] == ["search(query='a')", "ran search(query='a')"]


@pytest.mark.usefixtures("sandbox")
async def test_an_address_without_a_server_or_with_another_one_is_refused():
    with pytest.raises(ConfigError, match=r"--server: http://127.0.0.1:9/v1 does not answer"):
        async with server_talker("http://127.0.0.1:9", "", TalkConfig()):
            pass
    async with TestServer(web.Application()) as server:
        with pytest.raises(ConfigError, match="lists no model"):
            async with server_talker(str(server.make_url("/")), "", TalkConfig()):
                pass


@pytest.mark.parametrize(
    ("sent", "kind", "said"),
    [
        (b"<html>welcome</html>", "text/html", "streams no answer: it sent text/html, and no event"),
        (b'{"choices": [{"message": {"content": "2"}}]}', "application/json", "it sent application/json, and no event"),
        (b"data: [1]\n\n", "text/event-stream", r"failed: \[1\]"),
        (b"data: {not json\n\n", "text/event-stream", "sent invalid JSON: '{not json'"),
        (b'data: {"error": {"message": "full"}}\n\n', "text/event-stream", "failed: .*full"),
        (b'data: {"choices": "none"}\n\n', "text/event-stream", "sent a malformed event"),
        (b'data: {"choices": [{"delta": "2"}]}\n\n', "text/event-stream", "sent a malformed event"),
        (b'data: {"choices": [{"delta": {"tool_calls": [3]}}]}\n\n', "text/event-stream", "sent a malformed event"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "text/event-stream", "nested too deeply"),
        (b"x" * 9_000_000, "text/event-stream", "/v1 failed: LineTooLong"),
        (b"data: \xff\xfe\n\n", "text/event-stream", "sent invalid JSON"),
        (b"", "it hangs up", "/v1 failed: ServerDisconnectedError"),
    ],
    ids=lambda one: one[:24].decode("latin-1") if isinstance(one, bytes) else None,
)
@pytest.mark.usefixtures("sandbox")
async def test_what_is_not_an_answer_is_one_line(sent: bytes, kind: str, said: str):
    async def answer(request: web.Request) -> web.Response:
        if kind == "it hangs up":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(body=sent, content_type=kind)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", lambda request: asyncio.sleep(0, web.json_response({"data": [{"id": "m"}]})))
    async with TestServer(app) as server, server_talker(str(server.make_url("/")), "", TalkConfig()) as talk:
        with pytest.raises(RStarError, match=said) as failed:
            _ = [one async for one in talk.answer([{"role": "user", "content": "x"}])]
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 400


async def test_a_question_is_answered_on_the_screen(capsys: pytest.CaptureFixture[str]):
    await converse(FakeTalker(), ChatOptions(model="m", prompt="1?"), Screen())
    said = capsys.readouterr().out
    assert said.startswith("hm\nprint(1)") and "─ result ─" in said and said.endswith("It is 1.\n")


@pytest.mark.real
async def test_custom_tools_run_in_a_talk_as_in_a_rollout(tmp_path: Path):
    (tmp_path / "mine.py").write_text(SEARCH)
    config = ToolsConfig(use=("python", "mine:all_of_them"))
    specs = tool_specs(config.use, str(tmp_path))
    async with talk_tools(specs, config, str(tmp_path)) as tools:

        async def said(name: str, answer: AnswerTools) -> str:
            call = ToolCall(code="print(6*7)") if name == "python" else ToolCall(tool=name, arguments={"query": "a"})
            return (await answer.execute(call)).text.strip()

        first = tools.open(begun("talk-1", [{"role": "user", "content": "why?"}]))
        second = tools.open(begun("talk-2", [{"role": "user", "content": "who?"}]))
        assert [await said(spec.name, first) for spec in specs] == ["42", "A", "aa", "why? a 1"]
        assert (await said("count", first), await said("count", second)) == ("why? a 2", "who? a 1")
        first.close()
        second.close()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"tools": ToolsConfig(use=("own:search",))}, "--tools.use"),
        ({"tools": ToolsConfig(max_calls_per_turn=4)}, "--tools.max-calls-per-turn"),
        ({"own_folder": "x"}, "--own-folder"),
    ],
)
def test_tools_that_clients_run_are_not_named_at_the_server(given: dict[str, Any], option: str):
    with pytest.raises(ConfigError, match=f"{option}: without --run-tools, clients define and run the tools"):
        ServeOptions(model="m", **given)
    assert ServeOptions(model="m", run_tools=True, **given).run_tools
