"""The server's connections: no more than descriptors allow, and no idle ones beyond a time limit."""

import asyncio
import logging
import os
import resource
import time
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

IDLE_S = 75.0  # idle time between two requests of a connection
HEADERS_S = 20.0  # from its opening to the end of its first request's headers
LINGER_S = 2.0  # the rest of a body is read for so long after an early answer, else the client may lose the answer
RESERVED = 64  # descriptors for short uses: files of long inputs, working folders, the start of a process
MOST = 20_000


class _WithoutParserErrors(logging.Filter):
    """Ignores parser errors: clients could otherwise fill the disk with log lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


request_log = logging.getLogger("sandbox.http.requests")
request_log.addFilter(_WithoutParserErrors())


def room_for_connections(other_descriptors: int = 0) -> int:
    """How many connections this process can hold open, at least an eighth of the hard limit; lifts the soft limit.

    `other_descriptors`: needed in addition to those that are open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    open_now = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 128  # noqa: PTH208
    return max(min(hard - open_now - other_descriptors - RESERVED, MOST), hard // 8)


class Connection(asyncio.Protocol):
    """Passes a connection's events to aiohttp's protocol; records since when it has no request to answer."""

    def __init__(self, inner: asyncio.Protocol, room: "ConnectionRoom") -> None:
        self._inner = inner
        self._room = room
        self._requests = 0
        self.transport: asyncio.Transport | None = None
        self.answered = False
        self.idle_since: float | None = time.monotonic()  # None while a request is answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._inner.connection_made(transport)
        self._room.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.leave(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin(self) -> None:
        """A request's headers are complete."""
        self._requests += 1
        self.answered, self.idle_since = True, None

    def end(self) -> None:
        """A request is answered."""
        self._requests -= 1
        if not self._requests:
            self.idle_since = time.monotonic()

    def overdue(self, now: float) -> bool:
        """True if no request has arrived for too long."""
        return self.idle_since is not None and now - self.idle_since > (IDLE_S if self.answered else HEADERS_S)

    def drop(self) -> None:
        """Close at once, without an answer."""
        if self.transport is not None:
            self.transport.abort()


class ConnectionRoom:
    """All open connections; if there are more than `most`, it drops the one that has been idle longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[asyncio.BaseTransport, Connection] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection) -> None:
        assert connection.transport is not None
        self._open[connection.transport] = connection
        if len(self._open) > self._most:
            idle = [each for each in self._open.values() if each.idle_since is not None]
            min(idle, key=lambda each: each.idle_since or 0.0).drop()

    def leave(self, connection: Connection) -> None:
        if connection.transport is not None:
            self._open.pop(connection.transport, None)

    def of(self, request: web.Request) -> Connection | None:
        """The connection of a request."""
        return self._open.get(request.transport) if request.transport is not None else None

    async def sweep(self) -> None:
        """Drop overdue connections, once a second."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for connection in [each for each in self._open.values() if each.overdue(now)]:
                connection.drop()


class Site(web.BaseSite):
    """A TCP site whose connections a `ConnectionRoom` bounds."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, room: ConnectionRoom) -> None:
        super().__init__(runner)
        self._address = (host, port)
        self._room = room
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"http://{self._address[0]}:{self._address[1]}"

    async def start(self) -> None:
        await super().start()
        handler = self._runner.server
        assert handler is not None
        host, port = self._address
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(handler(), self._room), host, port, backlog=4096)
        self._sweeper = asyncio.create_task(self._room.sweep(), name="idle connections")

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await super().stop()
