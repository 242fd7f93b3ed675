"""The agents' HTTP endpoint on loopback: chat completions and Messages; a key identifies the rollout."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from actors.talk.http_listener import body_of
from rstar_ray.agent import chat_request, messages_request
from rstar_ray.agent.chat_request import (
    BadRequest,
    ChatRequest,
    Chunks,
    Finished,
    closing_delta,
    model_entry,
    read_request,
)
from rstar_ray.agent.endpoint import MODEL
from rstar_ray.agent.messages_request import Events
from rstar_ray.agent.session import MAX_BODY_BYTES, AgentSession

log = logging.getLogger(__name__)

MESSAGES = "/v1/messages"
STATUSES = {"rollout_ended": 410, "too_many_requests": 429, "model_not_found": 404, "key": 401}
RETRY = "x-stainless-retry-count"
"""Header of OpenAI's and Anthropic's clients: above 0 if a request is repeated."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentEndpoint:
    """Routes requests to the sessions of one host by key, and formats errors."""

    def __init__(self, session_of: Callable[[str], AgentSession | None]) -> None:
        """`session_of(key)`: the rollout's session, also for a while after its end; None for an unknown key."""
        self._session_of = session_of

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._complete),
                web.post(MESSAGES, self._complete),
            ]
        )
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequest as bad:
            return _problem(request, STATUSES.get(bad.code, 400), str(bad), bad.code)
        except RecursionError:
            return _problem(request, 400, "the body is nested too deeply")
        except web.HTTPException as refused:  # raised by aiohttp: no such route, a body above the limit
            answer = _problem(request, refused.status, refused.reason)
            answer.force_close()
            return answer

    def _session(self, request: web.Request) -> AgentSession:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        session = self._session_of(bearer or request.headers.get("x-api-key", ""))
        if session is None:
            raise BadRequest("the key belongs to no rollout here. Hint: use the endpoint's api_key", code="key")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [model_entry(MODEL)]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session, anthropic = self._session(request), _is_anthropic(request)
        body = await body_of(request)
        asked = messages_request.read_messages(body) if anthropic else read_request(body)
        if asked.model not in ("", MODEL):
            text = f"model: {asked.model[:100]!r} is not served here. Hint: the model's name is {MODEL}"
            raise BadRequest(text, code="model_not_found")
        pending = session.ask(asked, retry=request.headers.get(RETRY, "0") != "0")
        end = await session.answer_of(pending)
        name = f"{session.call.rollout_id}/{pending.number}"
        whole = messages_request.whole if anthropic else chat_request.whole
        if asked.stream:
            response = await _streamed(request, asked, end, name)
        else:
            response = web.json_response(whole(name, MODEL, end))
            await response.prepare(request)
            await response.write_eof()
        session.delivered(pending)
        return response


async def _streamed(request: web.Request, asked: ChatRequest, end: Finished, name: str) -> web.StreamResponse:
    """Send the answer as events, all at once, because it is complete only after sampling has ended."""
    anthropic = _is_anthropic(request)
    events = Events(name, MODEL) if anthropic else Chunks(name, MODEL, tells_usage=asked.tells_usage)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    message: Mapping[str, Any] = end.message
    parts: list[Mapping[str, Any]] = [
        {field: message[field]} for field in ("reasoning_content", "content") if message.get(field)
    ]
    if closing := closing_delta(message):
        parts.append(closing)
    await response.write(b"".join((events.begin(), *map(events.delta, parts), events.end(end))))
    await response.write_eof()
    return response


def _is_anthropic(request: web.Request) -> bool:
    return request.path.startswith(MESSAGES)


def _problem(request: web.Request, status: int, text: str, code: str = "") -> web.Response:
    body = messages_request.error_body if _is_anthropic(request) else chat_request.error_body
    return web.json_response(body(status, text, code), status=status)
