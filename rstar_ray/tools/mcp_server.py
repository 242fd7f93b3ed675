"""The tools of a Model Context Protocol server, through the official client (the optional package `mcp`)."""

import asyncio
import logging
import re
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rstar_ray.errors import ConfigError, ToolError, one_line
from rstar_ray.tools.tool import DEADLINE_S, MAX_CHARS, NAME, Tool, ToolFailed

log = logging.getLogger(__name__)

CONNECT_S = 30.0
WAIT_SHARE = 0.5
"""Share of a call's deadline for the connection; the rest is for the server's answer."""
MOST_UNANSWERED = 3
"""Calls in a row without an answer by their deadline, after which the server counts as lost."""
DEADLINE_SHARE = 0.9
"""A call that is cancelled after this share of its deadline timed out; before, its rollout was abandoned."""
GONE = ("Session terminated", "Server returned an error response")
"""The client's messages if the server has dropped the session, or answers with an HTTP error such as 401 or 503."""


def mcp_tools(
    server: str | Sequence[str],
    *,
    only: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    max_chars: int = MAX_CHARS,
) -> list[Tool]:
    """Every tool of a server, a URL or the words of a command; one connection serves all calls of a process.

    `only`: server's names of the tools to use. `rename`: the model's names, by the server's names. `headers`: sent to a
    URL with every request. `env`: added to the environment of a command. A result that the server marks as an error
    counts as failed; the loss of the server does not. Raises `ConfigError` if the server cannot be reached.
    """
    address = _Address(server=server, headers=dict(headers or {}), env=dict(env or {}))
    address.check()
    connection = _Connection(address)
    found = _found(address, connection)
    names = dict(rename or {})
    there = [tool.name for tool in found]
    for option, named in (("only", only), ("rename", names)):
        if unknown := [name for name in named if name not in there]:
            wrong = f"there is no tool {unknown[0]!r}"
            raise ConfigError(f"{address}, {option}", wrong, f"name some of {', '.join(there) or 'none'}")

    def made(tool: Any) -> Tool:
        name: str = names.get(tool.name) or tool.name
        where = f"{address}, tool {tool.name!r}"
        others = "or take others alone with only=[...]"
        if not NAME.fullmatch(name):
            another = {tool.name: re.sub(r"\W+", "_", name)}
            raise ConfigError(
                where, f"{name!r} is not a name for a tool", f"give it one with rename={another}, {others}"
            )
        try:
            return Tool(
                name=name,
                description=tool.description or name,
                parameters={"type": "object", "properties": {}, **tool.input_schema},
                function=connection.caller(tool.name, deadline_s),
                deadline_s=deadline_s,
                max_chars=max_chars,
            )
        except ConfigError as misfit:
            raise ConfigError(where, misfit.problem, f"{misfit.hint}, {others}") from None

    return [made(tool) for tool in found if not only or tool.name in only]


def _found(address: "_Address", connection: "_Connection") -> list[Any]:
    """The server's descriptions of its tools."""
    try:
        return _in_new_loop(connection.list_tools)
    except Exception as error:
        wrong = f"it does not answer within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else _root(error)
        raise ConfigError(str(address), wrong, "start it, or fix its address") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """The URL of a server, or the command that starts it."""

    server: str | Sequence[str]
    headers: Mapping[str, str]  # for a URL
    env: Mapping[str, str]  # for a command

    def __str__(self) -> str:
        return f"MCP server {self.server!r}"

    def check(self) -> None:
        """Raise `ConfigError` for invalid settings, before anything is started."""
        if not self.server:
            raise ConfigError("MCP server", "it is empty", "give a URL, or the words of a command")
        if self.headers and not isinstance(self.server, str):
            raise ConfigError(f"{self}, headers", "a command has none", "give env=, or the URL of a server")
        if self.env and isinstance(self.server, str):
            raise ConfigError(f"{self}, env", "a server at a URL has its own", "give headers=, or a command as a list")
        if absent := _absent():
            raise ConfigError(str(self), f"the package mcp is {absent}", "run: python -m pip install 'mcp>=2,<3'")

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Any, None]:
        """A connected client; it is closed on exit."""
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        if not isinstance(self.server, str):
            command, *arguments = self.server
            started = StdioServerParameters(command=command, args=arguments, env=dict(self.env))
            errors = sys.__stderr__ or sys.stderr  # sys.stderr may have been replaced by an object without a descriptor
            async with Client(stdio_client(started, errlog=errors)) as client:
                yield client
            return
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        patience = httpx2.Timeout(CONNECT_S, read=None)  # a call has a separate deadline
        async with (
            httpx2.AsyncClient(headers=dict(self.headers), timeout=patience) as web,
            Client(streamable_http_client(self.server, http_client=web)) as client,
        ):
            yield client


def _absent() -> str:
    """Why the package mcp cannot be used; empty if it can."""
    try:
        import mcp
    except ImportError:
        return "not installed here"
    return "" if hasattr(mcp, "Client") else "older than version 2"


class _Lost(Exception):
    """The server or the connection to it was lost."""


@dataclass(slots=True, eq=False)
class _Held:
    """A client that a task holds open until it is given up and has no open calls."""

    opened: asyncio.Future[Any]
    left: asyncio.Event = field(default_factory=asyncio.Event)
    asking: int = 0
    unanswered: int = 0  # calls in a row that had no answer by their deadline
    given_up: bool = False

    def close_if_left(self) -> None:
        if self.given_up and not self.asking:
            self.left.set()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a tool, with its deadline."""

    name: str
    arguments: dict[str, Any]
    begun_s: float  # the event loop's time
    deadline_s: float

    def after(self, share: float) -> float:
        """The time at which this share of the deadline is over."""
        return self.begun_s + share * self.deadline_s


class _Connection:
    """One client, opened by the first call and held open by a task; opened again after the server was lost."""

    def __init__(self, address: _Address) -> None:
        self._address = address
        self._held: _Held | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._second_tries = asyncio.Lock()

    async def list_tools(self) -> list[Any]:
        found: list[Any] = []
        async with asyncio.timeout(CONNECT_S), self._address.client() as client:
            page = await client.list_tools()
            found += page.tools
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                found += page.tools
        return found

    def caller(self, name: str, deadline_s: float) -> Callable[..., Awaitable[str]]:
        """Function that calls a tool. Raises `ToolFailed` if the server reports an error, `ToolError` if it is gone."""

        async def called(**arguments: Any) -> str:
            call = _Call(name, arguments, asyncio.get_running_loop().time(), deadline_s)
            try:
                result = await self._ask(call)
            except _Lost as lost:
                log.warning(f"{self._address} was lost ({lost}): reconnecting and repeating the call")
                result = await self._ask_again(call)
            text = "\n".join(map(_text_of, result.content))
            if result.is_error:
                raise ToolFailed(text)
            return text

        return called

    async def _ask_again(self, call: _Call) -> Any:
        """Repeat a call, one at a time, so that a call that crashes the server does not fail others."""
        try:
            async with asyncio.timeout_at(call.after(WAIT_SHARE)):
                await self._second_tries.acquire()
        except TimeoutError:
            raise ToolError(f"{self._address} was lost, and no time was left to ask it again") from None
        try:
            return await self._ask(call)
        except _Lost as lost:
            raise ToolError(f"{self._address} was lost twice ({lost})") from lost
        finally:
            self._second_tries.release()

    async def _ask(self, call: _Call) -> Any:
        """Call a tool. Raises `_Lost` and gives the connection up, but does not interrupt other calls that use it."""
        held = self._open()
        held.asking += 1
        try:
            client = await self._opened(held, call.after(WAIT_SHARE))
            result = await client.call_tool(call.name, call.arguments)
            held.unanswered = 0
            return result
        except asyncio.CancelledError:
            if asyncio.get_running_loop().time() >= call.after(DEADLINE_SHARE):
                held.unanswered += 1
                if held.unanswered == MOST_UNANSWERED:
                    log.warning(f"{self._address} left {MOST_UNANSWERED} calls in a row unanswered: reconnecting")
                    self._give_up(held)
            raise
        except Exception as error:
            if not _is_lost(error):
                held.unanswered = 0
                raise
            self._give_up(held)
            raise _Lost(_root(error)) from error
        finally:
            held.asking -= 1
            held.close_if_left()

    async def _opened(self, held: _Held, by_s: float) -> Any:
        try:
            async with asyncio.timeout_at(by_s):
                return await asyncio.shield(held.opened)
        except TimeoutError:
            raise ToolError(f"{self._address} is not connected yet, and the call's deadline half gone") from None

    def _open(self) -> _Held:
        if self._held is None:
            self._held = _Held(asyncio.get_running_loop().create_future())
            task = asyncio.create_task(self._hold(self._held))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._held

    async def _hold(self, held: _Held) -> None:
        try:
            async with asyncio.timeout(CONNECT_S) as opening, self._address.client() as client:
                opening.reschedule(None)
                held.opened.set_result(client)
                try:
                    await held.left.wait()
                finally:
                    self._give_up(held)  # after an end of the transport, no new call uses it
        except Exception as error:
            self._give_up(held)
            if not held.opened.done():
                held.opened.set_exception(_Lost(_root(error)))
                held.opened.exception()  # avoids asyncio's warning if no call waits for it

    def _give_up(self, held: _Held) -> None:
        held.given_up = True
        held.close_if_left()
        if self._held is held:
            self._held = None


def _text_of(part: Any) -> str:
    """One part of a result as text: its text, the text of an embedded file, or the part's type."""
    text = getattr(part, "text", None)
    if text is None:
        text = getattr(getattr(part, "resource", None), "text", None)
    return f"[{part.type}]" if text is None else str(text)


def _is_lost(error: Exception) -> bool:
    """Whether the error means that the server was lost; the server's error about a call does not."""
    import anyio
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return error.code == CONNECTION_CLOSED or error.message in GONE
    return isinstance(error, _Lost | OSError | anyio.ClosedResourceError | anyio.BrokenResourceError)


def _in_new_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine in a thread with a new loop, because modules may be imported inside a running loop."""
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
    """The first error inside an exception group, in one line."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) if isinstance(error, _Lost) else one_line(error)
