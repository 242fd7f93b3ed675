"""The tools of a Model Context Protocol server, through the official client (the optional package `mcp`)."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rstar_ray.errors import ConfigError
from rstar_ray.tools.tool import DEADLINE_S, MAX_CHARS, Tool, ToolFailed

CONNECT_S = 30.0


def mcp_tools(server: str | Sequence[str], *, deadline_s: float = DEADLINE_S, max_chars: int = MAX_CHARS) -> list[Tool]:
    """Every tool of a server, a URL or the words of a command; one connection serves all calls of a process.

    What the server marks as an error counts as failed. Raises `ConfigError` where it cannot be asked.
    """
    connection = _Connection(server)
    try:
        found = _in_a_loop_of_its_own(connection.list_tools)
    except Exception as error:
        raise ConfigError(f"MCP server {server!r}", _root(error), "start it, or mend its address") from None
    return [
        Tool(
            name=tool.name,
            description=tool.description or tool.name,
            parameters={"type": "object", "properties": {}, **tool.input_schema},
            function=connection.caller(tool.name),
            deadline_s=deadline_s,
            max_chars=max_chars,
        )
        for tool in found
    ]


class _Connection:
    """One client, opened by the first call and held by a task of its own."""

    def __init__(self, server: str | Sequence[str]) -> None:
        self._server = server
        self._holder: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None

    async def list_tools(self) -> list[Any]:
        async with asyncio.timeout(CONNECT_S), self._connected() as client:
            return list((await client.list_tools()).tools)

    def caller(self, name: str) -> Callable[..., Awaitable[str]]:
        async def call(**arguments: Any) -> str:
            result = await (await self._shared()).call_tool(name, arguments)
            text = "\n".join(part.text for part in result.content if hasattr(part, "text"))
            if result.is_error:
                raise ToolFailed(text)
            return text

        return call

    async def _shared(self) -> Any:
        if self._holder is None or self._holder.done() or self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._client))
        return await asyncio.shield(self._client)

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        try:
            async with self._connected() as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(ToolFailed(f"Error: the server does not answer ({_root(error)})"))

    def _connected(self) -> Any:
        from mcp import Client, StdioServerParameters

        if isinstance(self._server, str):
            return Client(self._server)
        command, *arguments = self._server
        return Client(StdioServerParameters(command=command, args=arguments))


def _in_a_loop_of_its_own(work: Callable[[], Awaitable[Any]]) -> Any:
    """Importing a module may happen inside a running loop."""
    found: list[Any] = []

    async def run() -> None:
        try:
            found.append(await work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _root(error: BaseException) -> str:
    """What is inside of the groups that task groups raise, in one line."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
