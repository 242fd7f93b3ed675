"""The HTTP face: Code Judge's routes over a pool, one of our own, and metrics.

    GET  /ping /status /metrics
    POST /run /run/batch /run/long-batch /judge /judge/batch /judge/long-batch   (Code Judge)
    POST /execute                                                                (ExecutionRequest)

JSON, or msgpack where the client says so in Content-Type and Accept.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
from aiohttp import web

from rstar_ray.errors import ConfigError, SandboxError
from sandbox.errors import SandboxFull, SandboxLate
from sandbox.http import code_judge
from sandbox.http.codec import request_from_data, result_to_data
from sandbox.http.metrics import PoolMetrics
from sandbox.limits import Limits
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest, ExecutionResult

MSGPACK = "application/msgpack"
MAX_BODY_BYTES = 512 * 1024 * 1024
REMEMBERED = 4096  # finished calls whose answer a retry may still fetch
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen and how long calls may take, queue included."""

    host: str = "127.0.0.1"
    port: int = 8088
    token: str = ""  # required of every client where the address is not loopback
    queue_s: float = 600.0  # a call
    long_queue_s: float = 3600.0  # a call of a long batch
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.token:
            raise ConfigError("token", f"{self.host} can be reached from elsewhere", "give --token, or use 127.0.0.1")
        if not 0 <= self.port < 65536:
            raise ConfigError("port", f"{self.port} is no port", "use 1 to 65535, or 0 for any")


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class SandboxServer:
    """Routes over one pool."""

    def __init__(self, pool: SandboxPool, config: ServerConfig) -> None:
        self._pool = pool
        self._config = config
        self._metrics = PoolMetrics(pool)
        self._remembered: OrderedDict[str, asyncio.Future[ExecutionResult]] = OrderedDict()

    def app(self) -> web.Application:
        """The aiohttp application."""
        middlewares = [self._authorize] if self._config.token else []
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        app.add_routes(
            [
                web.get("/ping", self._ping),
                web.get("/status", self._status),
                web.get("/metrics", self._show_metrics),
                web.post("/execute", self._execute),
                web.post("/run", self._one(verdict=False)),
                web.post("/judge", self._one(verdict=True)),
            ]
        )
        for route, verdict in (("/run", False), ("/judge", True)):
            app.router.add_post(f"{route}/batch", self._batch(verdict=verdict, queue_s=self._config.queue_s))
            app.router.add_post(f"{route}/long-batch", self._batch(verdict=verdict, queue_s=self._config.long_queue_s))
        return app

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        if request.path != "/ping" and not hmac.compare_digest(given, self._config.token.encode()):
            return web.json_response({"detail": "a valid token is required: Authorization: Bearer ..."}, status=401)
        return await handler(request)

    async def _ping(self, request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _status(self, request: web.Request) -> web.Response:
        stats = self._pool.stats()
        return web.json_response({"queue": stats.waiting, "num_workers": stats.slots})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    async def _execute(self, request: web.Request) -> web.Response:
        """Our own route: an ExecutionRequest in, an ExecutionResult out; same `call_id`, same answer."""
        try:
            wanted = request_from_data(await read_body(request))
        except ValueError as error:
            return reply(request, {"detail": str(error)}, 422)
        try:
            result = await self._run_once(wanted, request.remote or "")
        except SandboxFull as error:
            return reply(request, {"detail": str(error), "error": "full"}, 503)
        except SandboxError as error:
            return reply(request, {"detail": str(error), "error": type(error).__name__}, 503)
        return reply(request, result_to_data(result))

    async def _run_once(self, wanted: ExecutionRequest, caller: str) -> ExecutionResult:
        """Run a program, or join the run of an earlier request with the same id."""
        if not wanted.call_id:
            return await self._pool.run(wanted, caller, deadline_s=self._config.queue_s)
        known = self._remembered.get(wanted.call_id)
        if known is None:
            known = self._pool.submit(wanted, caller, deadline_s=self._config.queue_s)
            self._remembered[wanted.call_id] = known
            while len(self._remembered) > REMEMBERED and next(iter(self._remembered.values())).done():
                self._remembered.popitem(last=False)
        try:
            return await asyncio.shield(known)
        except SandboxError:
            self._remembered.pop(wanted.call_id, None)
            raise

    def _one(self, *, verdict: bool) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                submission = code_judge.read_submission(await read_body(request), self._config.limits)
            except ValueError as error:
                answer = code_judge.bad_answer("", str(error))
                return reply(request, {**answer, "detail": str(error)}, 422)
            answer = await self._answer(submission, request.remote or "", self._config.queue_s)
            return reply(request, code_judge.as_verdict(answer) if verdict else answer)

        return handle

    def _batch(self, *, verdict: bool, queue_s: float) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                sub_id, entries = code_judge.read_batch(await read_body(request), self._config.limits)
            except ValueError as error:
                return reply(request, {"detail": str(error), "reason": code_judge.INVALID_INPUT}, 422)
            caller = request.remote or ""
            work = [
                asyncio.ensure_future(self._answer(entry, caller, queue_s))
                for entry in entries
                if isinstance(entry, code_judge.Submission)
            ]
            try:
                done = iter(await asyncio.gather(*work))
            except asyncio.CancelledError:
                for task in work:
                    task.cancel()
                raise
            answers = [next(done) if isinstance(entry, code_judge.Submission) else entry for entry in entries]
            if verdict:
                answers = [code_judge.as_verdict(answer) for answer in answers]
            return reply(request, {"sub_id": sub_id, "results": answers})

        return handle

    async def _answer(self, submission: code_judge.Submission, caller: str, queue_s: float) -> dict[str, Any]:
        """Every submission has an answer; one that found no room or no time is told to come again."""
        try:
            result = await self._pool.run(submission.request, caller, deadline_s=queue_s)
        except (SandboxFull, SandboxLate) as error:
            return code_judge.failed_answer(submission.sub_id, code_judge.QUEUE_TIMEOUT, str(error))
        except SandboxError as error:
            return code_judge.failed_answer(submission.sub_id, code_judge.INTERNAL_ERROR, str(error))
        return code_judge.write_answer(submission, result)


async def read_body(request: web.Request) -> object:
    """Decode a body as its Content-Type says. Raises ValueError with a text for people, or HTTPBadRequest."""
    try:
        body = await request.read()
    except (web.HTTPException, ConnectionError):
        raise  # too large, say, or nobody there any more
    except Exception as error:  # of the decompressor, or of the HTTP parser
        headers = {"Connection": "close"}  # what follows on it cannot be told from the body
        raise web.HTTPBadRequest(text=f"the body cannot be read: {_text(error)}", headers=headers) from error
    try:
        if request.content_type in (MSGPACK, "application/x-msgpack"):
            return msgpack.unpackb(body, unicode_errors="surrogatepass")
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    except Exception as error:  # msgpack raises a dozen kinds
        raise ValueError(f"the body cannot be decoded: {_text(error)}") from error


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def reply(request: web.Request, data: object, status: int = 200) -> web.Response:
    """Encode an answer as the client asked."""
    if MSGPACK in request.headers.get("Accept", ""):
        body = msgpack.packb(data, unicode_errors="surrogatepass")
        return web.Response(body=body, status=status, content_type=MSGPACK)
    return web.Response(body=json.dumps(data).encode(), status=status, content_type="application/json")


async def start_server(pool: SandboxPool, config: ServerConfig) -> tuple[web.AppRunner, int]:
    """Listen; returns the runner, to be cleaned up by the caller, and the port."""
    app = SandboxServer(pool, config).app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=75.0)
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port, backlog=4096)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError("port", f"cannot listen on {config.host}:{config.port}: {error}", "use another") from error
    port: int = runner.addresses[0][1]
    _log.info("listening on %s:%d at level %s", config.host, port, pool.report.level)
    return runner, port
