"""A recipe that answers over HTTP: the address it listens on, or why it cannot."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from rstar_ray.errors import ConfigError


def refuse_port(port: int) -> None:
    """Raise `ConfigError` for what is no port."""
    if not 0 <= port < 65536:
        raise ConfigError("--port", f"{port} is no port", "give 1 to 65535, or 0 for any")


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
            raise ConfigError("--port", f"{host}:{port} cannot be used ({taken})", "give another") from taken
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
