"""The HTTP server over a pool: Code Judge's routes, a native one, and metrics.

    GET  /ping /status /metrics
    POST /run /run/batch /run/long-batch /judge /judge/batch /judge/long-batch   (Code Judge)
    POST /execute                                                                (ExecutionRequest)

JSON, or msgpack if the client's Content-Type and Accept name it.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
from aiohttp import web
from prometheus_client import generate_latest

from rstar_ray.errors import ConfigError, SandboxError, SandboxFull, SandboxLate
from sandbox.http import auth, code_judge, connections
from sandbox.http.answers import AnswerCache
from sandbox.http.auth import MSGPACK
from sandbox.http.codec import request_from_data, result_to_data
from sandbox.http.connections import ConnectionRoom, Site, room_for_connections
from sandbox.http.request_bodies import Bodies
from sandbox.http.server_metrics import PoolCollector
from sandbox.isolation import IsolationLevel
from sandbox.limits import CEILINGS, Limits, standard_limits
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest, ExecutionResult

TOKEN_VARIABLE = "SANDBOX_TOKEN"
"""Not an option, because every user of a machine can see a process's options."""
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address, clients, and limits of a call."""

    host: str = "127.0.0.1"
    port: int = 8088
    token: str = ""  # required if the address is not loopback, or the level is `process`
    allow_hosts: tuple[str, ...] = ()  # names of this server besides localhost, the host name and numeric addresses
    queue_s: float = 600.0  # deadline of a call, queue included
    long_queue_s: float = 3600.0  # deadline of a call of a long batch
    limits: Limits = field(default_factory=standard_limits)  # of a call that names none
    ceilings: Limits = CEILINGS  # the highest limits that a client may request

    def __post_init__(self) -> None:
        if not auth.is_loopback(self.host) and not self.token:
            raise ConfigError(TOKEN_VARIABLE, f"{self.host} can be reached from elsewhere", "set it, or use 127.0.0.1")
        if not 0 <= self.port < 65536:
            raise ConfigError("port", f"{self.port} is not a port", "use 1 to 65535, or 0 for any")
        auth.own_names(self.allow_hosts)
        if above := self.limits.above(self.ceilings):
            raise ConfigError("limits", f"{above} of a call that names none exceeds the ceiling", "raise the ceiling")


class SandboxServer:
    """Routes over a pool."""

    def __init__(self, pool: SandboxPool, config: ServerConfig, room: ConnectionRoom) -> None:
        self._pool = pool
        self._metrics = PoolCollector(pool)
        self._config = config
        self._room = room
        self._names = auth.own_names(config.allow_hosts)
        self._answers = AnswerCache()
        self._bodies = Bodies()

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._let_in])
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
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = auth.refusal(
            request.method, request.path, request.headers, token=self._config.token, names=self._names
        )
        if refused is not None:
            answer = web.json_response({"detail": refused.text}, status=refused.status)
            answer.force_close()  # its body is not read
            return answer
        connection = self._room.of(request)
        if connection is None:
            return await handler(request)
        connection.begin()
        try:
            return await handler(request)
        finally:
            connection.end()

    async def _ping(self, request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(code_judge.write_status(self._pool.stats()))

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics), content_type="text/plain", charset="utf-8")

    async def _execute(self, request: web.Request) -> web.Response:
        """The native route: an ExecutionRequest in, an ExecutionResult out; the same `call_id` gets the same answer."""
        try:
            wanted = request_from_data(await self._bodies.read(request), self._config.limits)
            if above := wanted.limits.above(self._config.ceilings):
                raise ValueError(f"limits.{above}: this server allows {getattr(self._config.ceilings, above)} at most")
            result = await self._run_once(wanted, request.remote or "")
        except ValueError as error:
            return reply(request, {"detail": str(error)}, 422)
        except SandboxFull as error:
            return reply(request, {"detail": str(error), "error": "full"}, 503)
        except SandboxError as error:
            return reply(request, {"detail": str(error), "error": type(error).__name__}, 503)
        return reply(request, result_to_data(result))

    async def _run_once(self, wanted: ExecutionRequest, caller: str) -> ExecutionResult:
        """Run a program, or join the run of an earlier request with the same id. Raises OtherCall, a ValueError."""

        def submit() -> asyncio.Future[ExecutionResult]:
            return self._pool.submit(wanted, caller, deadline_s=self._config.queue_s)

        if not wanted.call_id:
            return await submit()
        return await asyncio.shield(self._answers.get(wanted, submit))

    def _one(self, *, verdict: bool) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                submission = code_judge.read_submission(await self._bodies.read(request), self._config.limits)
            except ValueError as error:
                answer = code_judge.bad_answer("", str(error))
                return reply(request, {**answer, "detail": str(error)}, 422)
            answer = await self._answer(submission, request.remote or "", self._config.queue_s)
            return reply(request, code_judge.as_verdict(answer) if verdict else answer)

        return handle

    def _batch(self, *, verdict: bool, queue_s: float) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                sub_id, entries = code_judge.read_batch(await self._bodies.read(request), self._config.limits)
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
        """Every submission gets an answer; a full queue or a missed deadline is an error that asks for a retry."""
        try:
            result = await self._pool.submit(submission.request, caller, deadline_s=queue_s)
        except (SandboxFull, SandboxLate) as error:
            return code_judge.failed_answer(submission.sub_id, code_judge.QUEUE_TIMEOUT, str(error))
        except SandboxError as error:
            return code_judge.failed_answer(submission.sub_id, code_judge.INTERNAL_ERROR, str(error))
        return code_judge.write_answer(submission, result)


def reply(request: web.Request, data: object, status: int = 200) -> web.Response:
    """Encode an answer in the format that the client accepts."""
    if MSGPACK in request.headers.get("Accept", ""):
        body = msgpack.packb(data, unicode_errors="surrogatepass")
        return web.Response(body=body, status=status, content_type=MSGPACK)
    return web.Response(body=json.dumps(data).encode(), status=status, content_type="application/json")


async def start_server(pool: SandboxPool, config: ServerConfig) -> tuple[web.AppRunner, int]:
    """Serve a pool; returns the runner, which the caller cleans up, and the port. Raises ConfigError."""
    if pool.report.level is IsolationLevel.PROCESS and not config.token:
        raise ConfigError(
            TOKEN_VARIABLE, "at level process programs may do all that this user may", "set it, or give another --level"
        )

    room = ConnectionRoom(room_for_connections(pool.max_descriptors))
    app = SandboxServer(pool, config, room).app()
    runner = web.AppRunner(
        app,
        logger=connections.request_log,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=connections.IDLE_S,
        lingering_time=connections.LINGER_S,
    )
    await runner.setup()
    try:
        await Site(runner, config.host, config.port, room).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError("port", f"cannot listen on {config.host}:{config.port}: {error}", "use another") from error
    port = runner.addresses[0][1]
    _log.info("listening on %s:%d at level %s", config.host, port, pool.report.level)
    return runner, port
