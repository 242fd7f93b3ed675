"""Servers of the Model Context Protocol, real ones: they die, have many tools or odd ones, require settings."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from rstar_ray.errors import ConfigError
from rstar_ray.outcome import Outcome
from rstar_ray.tools.host import HostAnswer, HostCall, ToolHost
from rstar_ray.tools.mcp_server import mcp_tools
from rstar_ray.tools.tool import Tool

FRAIL = """
import asyncio, os, sys, time
from pathlib import Path
from mcp.server.mcpserver import Context, MCPServer
folder = Path(__file__).parent
with (folder / "starts").open("a") as starts: starts.write("x")
if (folder / "broken").exists(): sys.exit(1)
server = MCPServer("frail")
@server.tool()
async def echo(text: str) -> str:
    if text == "crash": os._exit(3)
    if text == "crash once" and not (folder / "crashed").exists():
        (folder / "crashed").touch()
        os._exit(3)
    if text == "bad": raise ValueError("of the text")
    if text.startswith("slow"): await asyncio.sleep(0.5)
    if text == "hang once" and not (folder / "hung").exists():
        (folder / "hung").write_text(str(os.getpid()))
        time.sleep(1_000)
    return text
@server.tool()
def variable(name: str) -> str: return os.environ.get(name, "unset")
@server.tool()
def header(name: str, context: Context) -> str: return (context.headers or {}).get(name, "unset")
if len(sys.argv) > 1: server.run("streamable-http", port=int(sys.argv[1]))
server.run("stdio")
"""
PAGED = """
import anyio, sys
from mcp import MCPError, types
from mcp.server import Server
from mcp.server.stdio import stdio_server
NAMES = ["github.search", "github.issue", "fits", "odd"]
async def listed(context, params):
    at = int(params.cursor) if params and params.cursor else 0
    schemas = {"odd": {"type": "object", "required": ["absent"]}}
    tool = types.Tool(name=NAMES[at], input_schema=schemas.get(NAMES[at], {"type": "object", "properties": {}}))
    return types.ListToolsResult(tools=[tool], next_cursor=str(at + 1) if at + 1 < len(NAMES) else None)
async def called(context, params):
    if params.arguments: raise MCPError(types.INVALID_PARAMS, "takes nothing")
    file = types.TextResourceContents(uri="file:///a.txt", text="of a file")
    image = types.ImageContent(type="image", data="AA==", mime_type="image/png")
    text = types.TextContent(type="text", text="called " + params.name)
    return types.CallToolResult(content=[text, types.EmbeddedResource(type="resource", resource=file), image])
server = Server("paged", on_list_tools=listed, on_call_tool=called)
async def main():
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())
anyio.run(main)
"""


@pytest.fixture
def frail(tmp_path: Path) -> list[str]:
    (tmp_path / "frail.py").write_text(FRAIL)
    return [sys.executable, str(tmp_path / "frail.py")]


@pytest.fixture
def paged(tmp_path: Path) -> list[str]:
    (tmp_path / "paged.py").write_text(PAGED)
    return [sys.executable, str(tmp_path / "paged.py")]


def host_of(tools: list[Tool], name: str = "echo") -> ToolHost:
    return ToolHost(next(tool for tool in tools if tool.name == name))


async def until_it_answers(host: ToolHost) -> None:
    async with asyncio.timeout(60):
        while (await say(host, "a")).outcome is not Outcome.OK:
            pass


async def say(host: ToolHost, text: str) -> HostAnswer:
    return await host.call(HostCall(arguments={"text": text}))


@pytest.mark.real
async def test_a_server_that_dies_is_restarted_and_the_call_made_again(
    frail: list[str], tmp_path: Path, logged: list[str]
):
    host = host_of(mcp_tools(frail, deadline_s=60))
    assert (await say(host, "a")).text == "a"
    starts = len((tmp_path / "starts").read_text())
    again = await say(host, "crash once")
    assert (again.outcome, again.text, again.fault) == (Outcome.OK, "crash once", "")
    assert len((tmp_path / "starts").read_text()) == starts + 1
    (line,) = logged
    assert line.startswith(f"MCP server {frail!r} was lost (MCPError: Connection closed)")
    refused = await say(host, "bad")
    assert (refused.outcome, refused.fault) == (Outcome.ERROR, "") and "echo" in refused.text


@pytest.mark.real
async def test_a_server_that_hangs_is_given_up_and_ended(frail: list[str], tmp_path: Path, logged: list[str]):
    host = host_of(mcp_tools(frail, deadline_s=2))
    await until_it_answers(host)  # a start may take longer than a call
    hung = [await say(host, "hang once"), await say(host, "a"), await say(host, "a")]
    assert [one.outcome for one in hung] == [Outcome.TIMEOUT] * 3
    await until_it_answers(host)
    assert any("3 calls in a row unanswered: reconnecting" in line for line in logged)
    async with asyncio.timeout(60):
        while psutil.pid_exists(int((tmp_path / "hung").read_text())):
            await asyncio.sleep(0.05)


@pytest.mark.real
async def test_a_call_that_ends_its_server_each_time_is_not_an_outcome_and_harms_no_other(frail: list[str]):
    host = host_of(mcp_tools(frail, deadline_s=60))
    assert (await say(host, "a")).text == "a"
    crash, *slow = await asyncio.gather(*(say(host, text) for text in ("crash", "slow 1", "slow 2", "slow 3")))
    assert crash.fault == f"MCP server {frail!r} was lost twice (MCPError: Connection closed)"
    assert [(answer.outcome, answer.text) for answer in slow] == [(Outcome.OK, f"slow {n}") for n in (1, 2, 3)]
    assert (await say(host, "b")).text == "b"


@pytest.mark.real
async def test_all_pages_of_tools_are_read_and_some_taken_under_other_names(paged: list[str]):
    taken = mcp_tools(paged, only=["fits", "github.issue"], rename={"github.issue": "issue"}, deadline_s=60)
    assert [tool.name for tool in taken] == ["issue", "fits"]
    assert (
        await host_of(taken, "issue").call(HostCall(arguments={}))
    ).text == "called github.issue\nof a file\n[image]"
    refused = await host_of(taken, "issue").call(HostCall(arguments={"a": 1}))
    assert (refused.outcome, refused.text, refused.fault) == (Outcome.ERROR, "Error: MCPError: takes nothing", "")


@pytest.mark.real
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {},
            "tool 'github.search': 'github.search' is not a name for a tool. Hint: give it one with "
            "rename={'github.search': 'github_search'}, or take others alone with only=[...]",
        ),
        (
            {"only": ["fits", "fit"]},
            "only: there is no tool 'fit'. Hint: name some of github.search, github.issue, fits, odd",
        ),
        ({"only": ["fits"], "rename": {"x": "y"}}, "rename: there is no tool 'x'. Hint: name some of"),
        (
            {"only": ["odd"]},
            "tool 'odd': 'absent' is required and no property. Hint: "
            'write {"type": "object", "properties": {...}}, or take others alone with only=[...]',
        ),
    ],
)
def test_tools_that_are_invalid_here_are_refused_with_the_way_around(
    paged: list[str], options: dict[str, Any], complaint: str
):
    with pytest.raises(ConfigError) as refused:
        mcp_tools(paged, **options)
    assert str(refused.value).startswith(f"MCP server {paged!r}, {complaint}")


@pytest.mark.real
async def test_a_command_gets_its_environment(frail: list[str]):
    host = host_of(mcp_tools(frail, env={"RSTAR_KEY": "secret"}, deadline_s=60), "variable")
    assert (await host.call(HostCall(arguments={"name": "RSTAR_KEY"}))).text == "secret"
    assert (await host.call(HostCall(arguments={"name": "RSTAR_OTHER"}))).text == "unset"


@pytest.mark.real
async def test_a_server_at_a_url_gets_its_headers_and_is_found_again_when_it_comes_back(frail: list[str]):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(frail, port):
        tools = mcp_tools(f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "secret"})
        header, echo = host_of(tools, "header"), host_of(tools)
        assert (await header.call(HostCall(arguments={"name": "x-key"}))).text == "secret"
    gone = await say(echo, "a")
    assert gone.fault.startswith(f"MCP server 'http://127.0.0.1:{port}/mcp' was lost twice")
    with serving(frail, port):
        assert (await say(echo, "a")).text == "a"


@pytest.mark.real
async def test_a_server_that_forgot_the_session_is_asked_in_a_new_one_and_one_that_is_overloaded_is_our_failure():
    with ThreadingHTTPServer(("127.0.0.1", 0), OfSessions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = host_of(mcp_tools(f"http://127.0.0.1:{server.server_port}/mcp"))
        assert (await say(host, "a")).text == "a"
        OfSessions.known.clear()
        again = await say(host, "b")
        assert (again.outcome, again.text) == (Outcome.OK, "b") and len(OfSessions.known) == 1
        OfSessions.status = 503
        assert "was lost twice" in (await say(host, "c")).fault
        OfSessions.status = 200
        assert (await say(host, "d")).text == "d"
        server.shutdown()


class OfSessions(BaseHTTPRequestHandler):
    """A server as they were before 2026, with as much of the protocol as it takes."""

    known: ClassVar[set[str]] = set()
    status: ClassVar[int] = 200
    TOOL: ClassVar[Any] = {
        "name": "echo",
        "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
    }

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.status != 200:
            return self.say(self.status, b"")
        if "id" not in asked:
            return self.say(202, b"")
        if asked["method"] == "server/discover":
            return self.answer(asked, error={"code": -32601, "message": "unknown"})
        if asked["method"] == "initialize":
            self.known.add(session := str(time.monotonic_ns()))
            able = {"capabilities": {"tools": {}}, "serverInfo": {"name": "old", "version": "1"}}
            return self.answer(asked, session, result={"protocolVersion": "2025-06-18", **able})
        if self.headers.get("mcp-session-id") not in self.known:
            return self.say(404, b"")
        if asked["method"] == "tools/list":
            return self.answer(asked, result={"tools": [self.TOOL]})
        text = asked["params"]["arguments"]["text"]
        return self.answer(asked, result={"content": [{"type": "text", "text": text}]})

    def do_GET(self) -> None:
        self.say(405, b"")

    def do_DELETE(self) -> None:
        self.say(200, b"")

    def answer(self, asked: Any, session: str = "", **parts: Any) -> None:
        self.say(200, json.dumps({"jsonrpc": "2.0", "id": asked["id"], **parts}).encode(), session)

    def say(self, status: int, body: bytes, session: str = "") -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if session:
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def serving(command: list[str], port: int) -> Iterator[None]:
    served = subprocess.Popen([*command, str(port)], stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        until_s = time.monotonic() + 600
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert served.poll() is None and time.monotonic() < until_s
            time.sleep(0.05)
        yield
    finally:
        served.kill()
        served.wait()


@pytest.mark.parametrize(
    ("server", "options", "complaint"),
    [
        (["x"], {"headers": {"a": "b"}}, "MCP server ['x'], headers: a command has none. Hint: give env="),
        ("http://x", {"env": {"a": "b"}}, "MCP server 'http://x', env: a server at a URL has its own"),
        ([], {}, "MCP server: it is empty. Hint: give a URL, or the words of a command"),
    ],
)
def test_what_no_such_server_takes_is_refused(server: Any, options: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError) as refused:
        mcp_tools(server, **options)
    assert str(refused.value).startswith(complaint)
