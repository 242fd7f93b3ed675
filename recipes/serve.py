"""OpenAI's chat completions and Anthropic's Messages by a trained policy, for any chat client or agent.

python recipes/serve.py --model runs/tiny/checkpoints/stage3-step-000025/model

POST /v1/chat/completions and /v1/messages (streaming or not), GET /v1/models, GET /ping. A client's tools are shown to
the policy, whose calls come back as `tool_calls`; its thoughts come as `reasoning_content`. With `--run-tools` the
tools of `--tools.use` run inside: the client receives the agent's answer, and what it thinks, runs and reads as
`reasoning_content`. Every request needs the token in the environment variable RSTAR_RAY_TOKEN, or else a new one that
is shown at the start.
"""

import asyncio
import logging
import re
import secrets
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from multidict import CIMultiDict

from actors.launch.exit_status import status_of
from actors.talk.http_listener import body_of, given_token, listening, refuse_port, refuse_taken, until_interrupted
from actors.talk.policy_answers import PolicyAnswers
from actors.talk.talker import TalkConfig, Talker, own_engine, own_talker
from rstar_ray.agent import chat_request, messages_request
from rstar_ray.agent.chat_request import BadRequest, ChatRequest, Chunks, Finished, model_entry, usage_of
from rstar_ray.agent.messages_request import Events
from rstar_ray.agent.talk import TalkEvent
from rstar_ray.config import ToolsConfig, leaves
from rstar_ray.config.options import options_of, spelled
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.trajectory import Sampling, StopReason
from sandbox.http import auth

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 2**20
MAX_TALKS = 64
"""Most concurrent requests; further ones receive an error and should retry."""
ALIAS = "policy"
"""A model name that is always accepted, beside that of --model."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class ServeOptions(TalkConfig):
    """The served policy, and access to it."""

    model: str = ""
    """a model's folder, or a hub's id"""
    host: str = "127.0.0.1"
    """address listened on"""
    run_tools: bool = False
    """run the tools of --tools.use in the server and answer as the whole agent; otherwise clients define and
    run tools
    """
    port: int = 8000
    """port listened on; 0 takes any"""
    allow_host: tuple[str, ...] = ()
    """names of this server beside localhost, the machine's own, and plain addresses"""
    allow_origin: tuple[str, ...] = ()
    """origins of web pages that may send requests too, as https://host:port"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("--model", "it is empty", "give a model's folder or a hub's id")
        refuse_port(self.port)
        defaults = {"own_folder": "", **leaves(ToolsConfig(), "tools.")}
        given = {"own_folder": self.own_folder, **leaves(self.tools, "tools.")}
        unused = [name for name in given if given[name] != defaults[name]]
        if unused and not self.run_tools:
            why = "without --run-tools, clients define and run the tools"
            raise ConfigError(spelled(unused[0]), why, "remove it, or give --run-tools")
        auth.own_names(self.allow_host)
        for origin in self.allow_origin:
            if not re.fullmatch(r"https?://[^/?#\s]+", origin):
                raise ConfigError("--allow-origin", f"{origin!r} is not an origin", "give one as https://host:port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The request and response formats of one API."""

    read: Callable[[bytes], ChatRequest]  # raises `BadRequest`
    whole: Callable[[str, str, Finished], dict[str, Any]]  # (id, model, answer)
    events: Callable[[str, str, ChatRequest], Chunks | Events]
    error: Callable[[int, str, str], dict[str, Any]]  # (status, text, code)


MESSAGES = "/v1/messages"
OPENAI = Dialect(
    read=chat_request.read_request,
    whole=chat_request.whole,
    events=lambda name, model, asked: Chunks(name, model, tells_usage=asked.tells_usage),
    error=chat_request.error_body,
)
ANTHROPIC = Dialect(
    read=messages_request.read_messages,
    whole=messages_request.whole,
    events=lambda name, model, asked: Events(name, model),
    error=messages_request.error_body,
)


def dialect_of(request: web.Request) -> Dialect:
    return ANTHROPIC if request.path.startswith(MESSAGES) else OPENAI


class Answers(Protocol):
    """Answers one request: the deltas of its message, then `Finished`. Raises `ValueError` where it cannot."""

    def answer(self, request: ChatRequest) -> AsyncGenerator[Mapping[str, Any] | Finished, None]: ...


class AgentAnswers:
    """Answers by an agent whose tools run in the server."""

    def __init__(self, talker: Talker, sampling: Sampling) -> None:
        """`sampling` is used where a request sets none."""
        self._talker = talker
        self._sampling = sampling

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Mapping[str, Any] | Finished, None]:
        """As `Answers`."""
        for name, given in (("tools", request.tools), ("stop", request.stop), ("logprobs", request.logprobs)):
            if given:
                raise BadRequest(f"{name}: not with --run-tools, where the agent's own tools run. Hint: leave it out")
        if request.messages[-1]["role"] != "user":
            raise BadRequest("messages: with --run-tools the last one must be of the user")
        said, thought, end = "", "", TalkEvent(kind="end")
        sampling = request.sampling(self._sampling)
        parts = self._talker.answer(request.messages, max_tokens=request.max_tokens, sampling=sampling)
        async for heard in parts:
            delta = delta_of(heard)
            said += delta.get("content", "")
            thought += delta.get("reasoning_content", "")
            end = heard
            if delta:
                yield delta
        if end.text == StopReason.REFUSED:
            problem = f"the messages are {end.prompt_tokens} tokens, which leaves no room in the context"
            raise BadRequest(f"{problem}. Hint: shorten them", code="context_length_exceeded")
        message = {"role": "assistant", "content": said, "reasoning_content": thought}
        finish = "stop" if end.text == "answered" else "length"
        yield Finished(message=message, finish=finish, usage=usage_of(end.prompt_tokens, end.num_tokens))


class Server:
    """Authentication, limits and routes in front of `Answers`."""

    def __init__(self, answers: Answers, options: ServeOptions, token: str) -> None:
        self._answers = answers
        self._options = options
        self._token = token
        self._names = auth.own_names(options.allow_host)
        self._talks = 0

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._let_in], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/ping", self._ping),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._complete),
                web.post(MESSAGES, self._complete),
            ]
        )
        return app

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        invited = self._cross_origin(request.headers)
        if invited and request.method == "OPTIONS":  # a browser's preflight request has no token
            return web.Response(status=204, headers=invited)
        headers = request.headers
        if "Authorization" not in headers and "x-api-key" in headers:
            headers = CIMultiDict(headers, Authorization=f"Bearer {headers['x-api-key']}")
        refused = auth.refusal(
            request.method,
            request.path,
            headers,
            token=self._token,
            names=self._names,
            origins=self._options.allow_origin,
        )
        if refused is not None:
            answer = _problem(request, refused.status, refused.text)
            answer.force_close()  # its body is not read
            answer.headers.update(invited)
            return answer
        try:
            answer = await handler(request)
        except web.HTTPException as refused:  # of aiohttp: no such route, a body above the limit
            answer = _problem(request, refused.status, refused.reason)
            answer.force_close()
        if not answer.prepared:
            answer.headers.update(invited)
        return answer

    def _cross_origin(self, headers: Mapping[str, str]) -> dict[str, str]:
        origin = headers.get("Origin", "")
        if not origin or origin not in self._options.allow_origin:
            return {}
        usual = "Authorization, Content-Type, x-api-key, anthropic-version"
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Headers": headers.get("Access-Control-Request-Headers", usual),
            "Access-Control-Allow-Methods": "GET, POST",
            "Vary": "Origin, Access-Control-Request-Headers",
        }

    async def _ping(self, request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [model_entry(self._options.model)]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self._talks >= MAX_TALKS:
            return _problem(request, 503, f"{self._talks} answers are under way; ask again later")
        self._talks += 1
        dialect, name, model = dialect_of(request), secrets.token_hex(12), self._options.model
        try:
            asked = dialect.read(await body_of(request))
            if asked.model not in ("", ALIAS, model, Path(model).name):
                known = f"{model} and {ALIAS}"
                text = f"model: {asked.model[:100]!r} is not served here. Hint: the model is known as {known}"
                return _problem(request, 404, text, "model_not_found")
            async with aclosing(self._answers.answer(asked)) as parts:
                if asked.stream:
                    return await self._streamed(request, parts, dialect.events(name, model, asked))
                *_, end = [part async for part in parts if isinstance(part, Finished)]
                return web.json_response(dialect.whole(name, model, end))
        except BadRequest as bad:
            return _problem(request, 400, str(bad), bad.code)
        except ValueError as refused:  # of the template: roles in an order that it does not know
            return _problem(request, 400, str(refused))
        except RecursionError:
            return _problem(request, 400, "the body is nested too deeply")
        except RStarError as failed:
            return _problem(request, 500, str(failed))
        finally:
            self._talks -= 1

    async def _streamed(
        self, request: web.Request, parts: AsyncGenerator[Mapping[str, Any] | Finished, None], events: Chunks | Events
    ) -> web.StreamResponse:
        invited = self._cross_origin(request.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **invited})
        part: Mapping[str, Any] | Finished | None = await anext(parts)  # a refusal is a status
        await response.prepare(request)  # from here on nothing but events may be written
        try:
            await response.write(events.begin())
            while part is not None:
                await response.write(events.end(part) if isinstance(part, Finished) else events.delta(part))
                part = await anext(parts, None)
        except ConnectionError:  # the client has disconnected
            raise
        except Exception as failed:
            if not isinstance(failed, RStarError):
                log.exception("an answer failed")
            await response.write(events.failed(str(failed)))
        await response.write_eof()
        return response


def delta_of(heard: TalkEvent) -> dict[str, str]:
    """The delta that a client receives for one event."""
    match heard.kind:
        case "said":
            return {"content": heard.text}
        case "thought":
            return {"reasoning_content": heard.text}
        case "call":
            return {"reasoning_content": f"\n```python\n{heard.text}\n```\n"}
        case "result":
            return {"reasoning_content": f"```\n{heard.text}\n```\n"}
        case "end":
            return {}


def _problem(request: web.Request, status: int, text: str, code: str = "") -> web.Response:
    return web.json_response(dialect_of(request).error(status, text, code), status=status)


@asynccontextmanager
async def answering(options: ServeOptions) -> AsyncGenerator[Answers, None]:
    """The policy alone, or the agent with its tools."""
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p)
    if options.run_tools:
        async with own_talker(options.model, options) as talker:
            yield AgentAnswers(talker, sampling)
        return
    async with own_engine(options.model, options, None) as served:
        yield PolicyAnswers(
            served.chat,
            served.engine,
            sampling=sampling,
            max_tokens=options.max_tokens,
            context_tokens=served.context_tokens,
        )


async def serve(options: ServeOptions) -> None:
    """Until it is interrupted."""
    refuse_taken(options.host, options.port)  # an engine takes long to come up
    token = given_token() or secrets.token_urlsafe(24)
    async with answering(options) as answers:
        app = Server(answers, options, token).app()
        async with listening(app, options.host, options.port, cancels=True) as address:
            print(f"{address}/v1 serves {options.model}", flush=True)
            if token != given_token():
                print(f"Authorization: Bearer {token}", flush=True)
            await until_interrupted()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 ended by a person, 1 it failed, 2 refused before anything started."""

    def act() -> None:
        options = options_of(ServeOptions, argv, description=__doc__)
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(options))

    return status_of(act)


if __name__ == "__main__":
    sys.exit(main())
