"""OpenAI's chat completions by a trained agent, its tools run inside: any chat client can use it.

python recipes/serve.py --model runs/tiny/checkpoints/stage3-step-000018/model

POST /v1/chat/completions (streaming or not), GET /v1/models, GET /ping. What the agent thinks, runs and reads comes as
`reasoning_content`, what it says as `content`. Every request needs the token in the environment
variable RSTAR_RAY_TOKEN, or else a new one that is shown at the start.
"""

import asyncio
import json
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

from actors.launch.exit_status import status_of
from actors.talk.http_listener import given_token, listening, refuse_port, refuse_taken, until_interrupted
from actors.talk.talker import TalkConfig, Talker, own_talker
from rstar_ray.agent.talk import Heard
from rstar_ray.config.options import options_of
from rstar_ray.config.rollout import MAX_TEMPERATURE
from rstar_ray.data.conversation import RowError, conversation
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.trajectory import Sampling
from sandbox.http import auth

MAX_BODY_BYTES = 4 * 2**20
MAX_TALKS = 64
"""Answered at once; more are told to come later."""
NEUTRAL: dict[str, Sequence[Any]] = {
    "stop": ("", []),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
}
"""What of a request this server does not do, and the values that ask for nothing, beside null."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class ServeOptions(TalkConfig):
    """What is served, and to whom."""

    model: str = ""
    """a model's folder, or a hub's id"""
    host: str = "127.0.0.1"
    """address listened on"""
    port: int = 8000
    """port listened on; 0 takes any"""
    allow_host: tuple[str, ...] = ()
    """names of this server beside localhost, the machine's own, and plain addresses"""
    allow_origin: tuple[str, ...] = ()
    """web pages that may ask too, as https://host:port"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("--model", "it is empty", "give a model's folder or a hub's id")
        refuse_port(self.port)
        auth.own_names(self.allow_host)
        for origin in self.allow_origin:
            if not re.fullmatch(r"https?://[^/?#\s]+", origin):
                raise ConfigError("--allow-origin", f"{origin!r} is no origin", "give one as https://host:port")


class BadRequest(ValueError):
    """A request that cannot be answered, and why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as read."""

    messages: Sequence[Mapping[str, Any]]
    stream: bool
    max_tokens: int  # 0: the server's own
    sampling: Sampling | None
    tells_usage: bool  # at the end of a stream


class Server:
    """Routes over one talker."""

    def __init__(self, talker: Talker, options: ServeOptions, token: str) -> None:
        self._talker = talker
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
            ]
        )
        return app

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin", "")
        invited = self._cross_origin(origin)
        if invited and request.method == "OPTIONS":  # a browser asks first, without the token
            return web.Response(status=204, headers=invited)
        refused = auth.refusal(
            request.method,
            request.path,
            request.headers,
            token=self._token,
            names=self._names,
            origins=self._options.allow_origin,
        )
        if refused is not None:
            answer = _problem(refused.status, refused.text)
            answer.force_close()  # its body is not read
            answer.headers.update(invited)
            return answer
        answer = await handler(request)
        if not answer.prepared:
            answer.headers.update(invited)
        return answer

    def _cross_origin(self, origin: str) -> dict[str, str]:
        if not origin or origin not in self._options.allow_origin:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Headers": "Authorization, Content-Type",
            "Access-Control-Allow-Methods": "GET, POST",
            "Vary": "Origin",
        }

    async def _ping(self, request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._options.model, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = read_request(await request.read())
        except BadRequest as bad:
            return _problem(400, str(bad))
        if self._talks >= MAX_TALKS:
            return _problem(503, f"{self._talks} answers are under way; ask again later")
        self._talks += 1
        try:
            heard = self._talker.answer(asked.messages, max_tokens=asked.max_tokens, sampling=asked.sampling)
            if asked.stream:
                return await self._streamed(request, heard, tells_usage=asked.tells_usage)
            return web.json_response(await self._whole(heard))
        except ValueError as refused:  # of the template: roles in an order that it does not know
            return _problem(400, str(refused))
        except RStarError as failed:
            return _problem(500, str(failed))
        finally:
            self._talks -= 1

    async def _whole(self, talk: AsyncIterator[Heard]) -> dict[str, Any]:
        said, thought, end = "", "", Heard(kind="end")
        async for heard in talk:
            delta = delta_of(heard)
            said += delta.get("content", "")
            thought += delta.get("reasoning_content", "")
            end = heard
        message = {"role": "assistant", "content": said, "reasoning_content": thought}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(end)}
        return self._envelope("chat.completion") | {"choices": [choice], "usage": usage_of(end)}

    async def _streamed(
        self, request: web.Request, talk: AsyncIterator[Heard], *, tells_usage: bool
    ) -> web.StreamResponse:
        invited = self._cross_origin(request.headers.get("Origin", ""))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **invited})
        first = await anext(talk)  # what refuses the conversation is told as a status
        await response.prepare(request)
        envelope = self._envelope("chat.completion.chunk")

        async def send(delta: Mapping[str, Any], finish: str | None) -> None:
            await tell({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        async def tell(fields: dict[str, Any]) -> None:
            event = envelope | fields
            await response.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

        try:
            await send({"role": "assistant", "content": ""}, None)
            heard: Heard | None = first
            while heard is not None:
                await send(delta_of(heard), finish_reason(heard) if heard.kind == "end" else None)
                if heard.kind == "end" and tells_usage:
                    await tell({"choices": [], "usage": usage_of(heard)})
                heard = await anext(talk, None)
        except RStarError as failed:
            await response.write(b"data: " + json.dumps({"error": {"message": str(failed)}}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _envelope(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{secrets.token_hex(12)}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._options.model}


def read_request(body: bytes) -> Asked:
    """Raises `BadRequest` with the field."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest("the body is no JSON") from error
    if not isinstance(fields, dict):
        raise BadRequest("the body is no object")
    fields = cast(dict[str, Any], fields)
    if fields.get("tools"):
        raise BadRequest("tools: the agent's own run inside; send none")
    if fields.get("n") not in (None, 1):
        raise BadRequest("n: one answer at a time")
    for name, nothing in NEUTRAL.items():
        if fields.get(name) is not None and fields[name] not in nothing:
            raise BadRequest(f"{name}: this server does not do it; leave it out")
    try:
        messages = conversation({"messages": fields.get("messages")}, "request").messages
    except RowError as error:
        raise BadRequest(f"messages: {error}") from error
    if messages[-1]["role"] != "user":
        raise BadRequest("messages: the last one is to be the user's")
    max_tokens = _number(fields, "max_completion_tokens", _number(fields, "max_tokens", 0, 0, 10**9), 0, 10**9)
    sampling = None
    if "temperature" in fields or "top_p" in fields:
        top_p = _number(fields, "top_p", 1.0, 1e-6, 1.0)
        sampling = Sampling(
            temperature=float(_number(fields, "temperature", 1.0, 0.0, MAX_TEMPERATURE)), top_p=float(top_p)
        )
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options: no object")
    tells_usage = bool(cast(dict[str, Any], options).get("include_usage"))
    return Asked(messages, bool(fields.get("stream")), int(max_tokens), sampling, tells_usage)


def _number(fields: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name}: {value!r} is not between {low:g} and {high:g}")
    if isinstance(default, int) and not isinstance(value, int):
        raise BadRequest(f"{name}: must be an integer (got {value!r})")
    return value


def delta_of(heard: Heard) -> dict[str, str]:
    """What a client is sent of one thing heard."""
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


def usage_of(end: Heard) -> dict[str, int]:
    """The conversation as it came, tools and instructions included, and what was sampled; results are neither."""
    total = end.prompt_tokens + end.num_tokens
    return {"prompt_tokens": end.prompt_tokens, "completion_tokens": end.num_tokens, "total_tokens": total}


def finish_reason(end: Heard) -> str:
    """In OpenAI's words."""
    return "stop" if end.text == "answered" else "length"


def _problem(status: int, text: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": text, "type": kind, "code": status}}, status=status)


async def serve(options: ServeOptions) -> None:
    """Until it is interrupted."""
    refuse_taken(options.host, options.port)  # an engine takes long to come up
    token = given_token() or secrets.token_urlsafe(24)
    async with own_talker(options.model, options) as talker:
        app = Server(talker, options, token).app()
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
