"""A recipe that answers over HTTP: the address it listens on, or why it cannot."""

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
    """The token in RSTAR_RAY_TOKEN, or empty. No option: every user of a machine sees the options of its processes."""
    return os.environ.get(TOKEN_VARIABLE, "").strip()


def refuse_port(port: int) -> None:
    """Raise `ConfigError` for what is not a port."""
    if not 0 <= port < 65536:
        raise ConfigError("--port", f"{port} is not a port", "give 1 to 65535, or 0 for any")


def refuse_taken(host: str, port: int) -> None:
    """Raise `ConfigError` for an address that `listening` could not use, for who has much to start before it."""
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
    """What binding to it, for a moment, failed by."""
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
    """Answer inside the block, which gets the address as http://host:port; port 0 takes any.

    With `cancels` an answer ends when its client goes. Raises `ConfigError` for an address that cannot be used.
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
    """Until the first Ctrl-C or SIGTERM; also where whoever started the process had it ignore Ctrl-C, as shells do with
    what they start in the background.
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
