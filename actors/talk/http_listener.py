"""HTTP listener of recipes: checks the address, listens, and waits for Ctrl-C."""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rstar_ray.agent.chat_request import BadRequest
from rstar_ray.errors import ConfigError

TOKEN_VARIABLE = "RSTAR_RAY_TOKEN"


async def body_of(request: web.Request) -> bytes:
    """Raises `BadRequest` for a body that cannot be read, and aiohttp's own errors."""
    try:
        return await request.read()
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as unreadable:  # such as invalid gzip
        raise BadRequest("the body cannot be read") from unreadable


def given_token() -> str:
    """The token in RSTAR_RAY_TOKEN, or empty. It is not an option, because other users can see command lines."""
    return os.environ.get(TOKEN_VARIABLE, "").strip()


def refuse_port(port: int) -> None:
    """Raise `ConfigError` for an invalid port number."""
    if not 0 <= port < 65536:
        raise ConfigError("--port", f"{port} is not a port", "give 1 to 65535, or 0 for any")


def refuse_taken(host: str, port: int) -> None:
    """Raise `ConfigError` for an address that `listening` could not use; called before a slow start."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        failures = [failed for family, *_, address in found if (failed := _bound(family, address))]
        if taken := next((one for one in failures if one.errno in (errno.EADDRINUSE, errno.EACCES)), None):
            raise taken
        if len(failures) == len(found):
            raise failures[0]
    except OSError as taken:
        raise _unusable(host, port, taken) from taken


def _bound(family: int, address: Any) -> OSError | None:
    """Bind to the address and close the socket; returns the error, None on success."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as failed:
        return failed
    return None


def _unusable(host: str, port: int, why: OSError) -> ConfigError:
    return ConfigError("--port", f"{host}:{port} cannot be used ({why})", "give another")


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int, *, cancels: bool = False) -> AsyncGenerator[str]:
    """Serve `app` while the context is open; yields the address as http://host:port. Port 0 takes any free port.

    `cancels`: cancel a handler when its client disconnects. Raises `ConfigError` for an address that cannot be used.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=cancels)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as taken:
            raise _unusable(host, port, taken) from taken
        found, number = runner.addresses[0][:2]
        yield f"http://[{found}]:{number}" if ":" in found else f"http://{found}:{number}"
    finally:
        await runner.cleanup()


async def until_interrupted() -> None:
    """Wait for the first Ctrl-C or SIGTERM, even if the process was started with SIGINT ignored, as shells do for
    background jobs.
    """
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, interrupted.set)
    try:
        await interrupted.wait()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
