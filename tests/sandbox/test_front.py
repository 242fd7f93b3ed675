"""One front for servers on several hosts: real servers on the loopback that are killed, leave, freeze and lie."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import msgpack
import pytest
from aiohttp import web

from sandbox.errors import SandboxLost
from sandbox.http import link
from sandbox.http.client import SandboxClient
from sandbox.http.fleet import Fleet
from sandbox.http.front import FrontConfig, front
from sandbox.http.link import MSGPACK
from sandbox.http.roster import Patience, Roster
from sandbox.http.server import ServerConfig
from sandbox.isolation import IsolationLevel
from sandbox.limits import CEILINGS
from sandbox.request import ExecutionRequest
from tests import derived
from tests.sandbox.as_user import REPOSITORY

pytestmark = [pytest.mark.caged, pytest.mark.asyncio(loop_scope="session")]
TOKEN, JOIN = "workers-only", "join-us"
HASTY = Patience(probe_s=0.1, busy_s=0.05, alone_s=0.5)  # with servers that pretend
PATIENT = Patience(probe_s=0.1)  # with real ones, on a busy machine
START_S = 120.0
CALLS = 2_000


class Server:
    """A sandbox server in a process of its own, known by its process id."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process = process
        self.address = address

    async def ran(self) -> int:
        """Programs that have ended there."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession() as http, http.get(f"{self.address}/metrics", headers=headers) as answer:
            text = await answer.text()
        return sum(int(float(count)) for count in re.findall(r"sandbox_calls_total\{.*\} (\S+)", text))

    def end(self) -> None:
        """Kill it, by its own id."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def started(*arguments: str, told: str) -> Server:
    """Start a module of ours; `told` is the pattern of the line with its port."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "SANDBOX_JOIN_TOKEN": JOIN}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd="/", env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(told, line)
    if found is None:
        process.kill()
        process.wait()
    assert found is not None, line
    return Server(process, f"http://127.0.0.1:{found[1]}")


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    both = [started("tests.sandbox.a_worker", "2", TOKEN, told=r"^(\d+)$") for _ in "ab"]
    yield both
    for server in both:
        server.end()


@asynccontextmanager
async def fronted(
    *addresses: str, patience: Patience = PATIENT, wall_s: float = 60.0, **changes: Any
) -> AsyncIterator[tuple[Fleet, str]]:
    """A front for workers at these addresses, and its own address."""
    most = replace(CEILINGS, wall_s=wall_s)
    door = ServerConfig(port=0, limits=derived.program(wall_s=min(wall_s, 40.0)), ceilings=most)
    config = FrontConfig(
        server=door,
        queue_size=50_000,
        level=IsolationLevel.NAMESPACES,
        workers=addresses,
        worker_token=TOKEN,
        join_token=JOIN,
        patience=patience,
    )
    async with front(replace(config, **changes)) as (fleet, port):
        yield fleet, f"http://127.0.0.1:{port}"


async def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it has not come to be"
        await asyncio.sleep(0.02)


async def many(url: str, calls: int = CALLS) -> list[str]:
    async with SandboxClient(url, timeout_s=600.0) as client:
        limits = derived.program(wall_s=40.0)  # for a busy machine
        room = asyncio.Semaphore(200)  # descriptors are dear in some places

        async def one(number: int) -> str:
            async with room:
                return (await client.run(ExecutionRequest(code=f"print({number})", limits=limits))).stdout

        return await asyncio.gather(*(one(number) for number in range(calls)))


def expected(calls: int = CALLS) -> list[str]:
    return [f"{number}\n" for number in range(calls)]


async def say(url: str, path: str, data: dict[str, Any], token: str = JOIN) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as http, http.post(f"{url}{path}", json=data, headers=headers) as answer:
        return answer.status, await answer.json()


def answered(fleet: Fleet) -> dict[str, int]:
    return {worker.address: worker.answered for worker in fleet.roster}


# Workers that come and go


@pytest.mark.slow
async def test_calls_are_shared_and_each_runs_once(servers: list[Server]):
    async with fronted(*(server.address for server in servers)) as (fleet, url):
        await until(lambda: len(fleet.roster.serving()) == 2)
        assert await many(url) == expected()
        by = answered(fleet)
        assert fleet.counts["retried"] == 0 and all(by.values())
    assert {server.address: await server.ran() - 1 for server in servers} == by  # each has tested its cage, too


@pytest.mark.slow
async def test_a_worker_that_is_killed_loses_no_call_and_only_its_own_run_again(servers: list[Server]):
    killed, other = servers
    async with fronted(*(server.address for server in servers)) as (fleet, url):
        await until(lambda: len(fleet.roster.serving()) == 2)
        calls = asyncio.create_task(many(url))
        await until(lambda: sum(answered(fleet).values()) > 200)
        os.kill(killed.process.pid, signal.SIGKILL)
        assert await calls == expected()
        by = answered(fleet)
        assert await other.ran() - 1 == by[other.address] and sum(by.values()) == CALLS
        assert 1 <= fleet.counts["retried"] <= 4  # what two programs at once, and two behind them, come to
        assert killed.address in fleet.roster.missing() and other.address not in fleet.roster.missing()


@pytest.mark.slow
async def test_a_worker_leaves_when_it_has_finished(servers: list[Server]):
    leaving, other = servers
    async with fronted(*(server.address for server in servers)) as (fleet, url):
        await until(lambda: len(fleet.roster.serving()) == 2)
        calls = asyncio.create_task(many(url))
        await until(lambda: answered(fleet)[leaving.address] > 50)
        worker = next(each for each in fleet.roster if each.address == leaving.address)
        before, given = worker.answered, 0  # programs that it had ended, and had been given, when it left
        while True:
            status, told = await say(url, "/workers/leave", {"address": leaving.address})
            given = given or worker.answered + len(worker.calls)
            assert status == 200
            if not told["under_way"]:
                break
            await asyncio.sleep(0.02)
        assert await calls == expected()
        assert fleet.counts["retried"] == 0 and list(answered(fleet)) == [other.address]
        ran = await leaving.ran() - 1
        assert before <= ran <= given and ran + answered(fleet)[other.address] == CALLS


async def test_a_worker_that_freezes_is_missing_until_it_thaws(servers: list[Server]):
    frozen = servers[0]
    patience = replace(PATIENT, probe_timeout_s=0.5, silent_s=1.0)
    async with fronted(*(server.address for server in servers), patience=patience) as (fleet, url):
        await until(lambda: len(fleet.roster.serving()) == 2)
        os.kill(frozen.process.pid, signal.SIGSTOP)
        try:
            assert await many(url, 50) == expected(50)
            await until(lambda: frozen.address in fleet.roster.missing())
        finally:
            os.kill(frozen.process.pid, signal.SIGCONT)
        await until(lambda: len(fleet.roster.serving()) == 2)


async def test_a_connection_that_breaks_is_tried_again_and_the_program_runs_once(servers: list[Server]):
    server = servers[0]
    broken: list[bytes] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """To the server and back, but for the first answer to a call."""
        there_reader, there = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                there.write(data)
                answer = await there_reader.read(65_536)
                if b"/execute" in data and not broken:
                    broken.append(answer)
                    break
                writer.write(answer)
        writer.close()
        there.close()

    proxy = await asyncio.start_server(carry, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    try:
        async with fronted(f"http://127.0.0.1:{port}") as (fleet, url):
            await until(lambda: bool(fleet.roster.serving()))
            before = await server.ran()
            assert await many(url, 1) == expected(1)
            assert broken and await server.ran() == before + 1 and fleet.counts["retried"] == 0
    finally:
        proxy.close()


# Workers that lie


def honest(request: dict[str, Any]) -> dict[str, Any]:
    return {"outcome": "ok", "stdout": "honest\n", "call_id": request["call_id"]}


Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def pretender(answer: Answer, status: object = None) -> AsyncIterator[str]:
    """A server that says what a test wants; its address."""

    async def execute(request: web.Request) -> web.StreamResponse:
        return await answer(request, msgpack.unpackb(await request.read()))

    async def state(request: web.Request) -> web.Response:
        return web.json_response(status or {"queue": 0, "num_workers": 1, "level": "namespaces"})

    app = web.Application()
    app.add_routes([web.get("/status", state), web.post("/execute", execute)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def packed(data: object, **more: Any) -> web.Response:
    return web.Response(body=msgpack.packb(data), content_type=MSGPACK, **more)


async def tell(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    return packed(honest(asked))


def lying(lie: Callable[[dict[str, Any]], web.StreamResponse]) -> Answer:
    async def answer(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return lie(asked)

    return answer


async def without_end(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": MSGPACK})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b"\x00" * 65_536)
    return response


async def with_anything_but_http(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"I am a teapot\r\n\r\n")
    request.transport.close()
    return web.Response()


LIES: dict[str, Answer] = {
    "garbage": lying(lambda asked: web.Response(body=b"\xc1\xc1", content_type=MSGPACK)),
    "another call's": lying(lambda asked: packed(honest(asked) | {"call_id": "another"})),
    "an unknown outcome": lying(lambda asked: packed(honest(asked) | {"outcome": "splendid"})),
    "a number for a text": lying(lambda asked: packed(honest(asked) | {"stdout": 7})),
    "a field too many": lying(lambda asked: packed(honest(asked) | {"reward": 1})),
    "no number": lying(lambda asked: packed(honest(asked) | {"wall_s": float("nan")})),
    "too long a text": lying(lambda asked: packed(honest(asked) | {"stdout": "x" * 5_000})),
    "nested": lying(lambda asked: web.Response(body=b"\x91" * 30_000, content_type=MSGPACK)),
    "nested JSON": lying(lambda asked: web.json_response(text="[" * 30_000)),
    "packed": lying(lambda asked: packed(honest(asked), headers={"Content-Encoding": "gzip"})),
    "a place elsewhere": lying(lambda asked: web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})),
    "a refusal of the token": lying(lambda asked: web.json_response({"detail": "who are you\x1b[2J?"}, status=401)),
    "a body without an end": without_end,
    "anything but HTTP": with_anything_but_http,
}


@pytest.mark.parametrize("lie", list(LIES))
async def test_a_worker_that_lies_is_set_aside_and_its_call_answered_by_another(lie: str):
    patience = replace(HASTY, retry_s=0.001)
    async with (
        pretender(LIES[lie]) as liar,
        pretender(tell) as other,
        fronted(liar, patience=patience) as (fleet, url),
        SandboxClient(url) as client,
    ):
        await until(lambda: bool(fleet.roster.serving()))
        call = asyncio.create_task(client.run(ExecutionRequest(code="1")))
        await until(lambda: liar in fleet.roster.missing())
        assert re.search(r"\(.{6,400}\)$", fleet.roster.missing()) and fleet.roster.missing().isprintable()
        fleet.roster.join(other, TOKEN)
        assert (await call).stdout == "honest\n"
        assert answered(fleet) == {liar: 0, other: 1} and fleet.counts["retried"] >= 1


async def test_a_worker_that_lies_again_is_left_alone_for_longer():
    async with (
        pretender(LIES["garbage"]) as liar,
        pretender(tell) as other,
        fronted(liar, other, patience=HASTY) as (fleet, url),
        SandboxClient(url) as client,
    ):
        await until(lambda: len(fleet.roster.serving()) == 2)
        end = time.monotonic() + 3.0
        asked = 0
        while time.monotonic() < end:
            assert (await client.run(ExecutionRequest(code="1"))).stdout == "honest\n"
            asked += 1
        assert 2 <= fleet.counts["retried"] <= 6 < asked  # after 0.2 s, 0.4 s, 0.8 s, 1.6 s


async def test_a_worker_that_never_answers_a_call_is_set_aside():
    async def never(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(600)
        return web.Response()

    async with pretender(never) as slow, pretender(tell) as other:
        patience = replace(HASTY, grace_s=0.1)
        async with fronted(slow, patience=patience, wall_s=0.2) as (fleet, url), SandboxClient(url) as client:
            await until(lambda: bool(fleet.roster.serving()))
            call = asyncio.create_task(client.run(ExecutionRequest(code="1", limits=derived.program(wall_s=0.1))))
            await until(lambda: "has not answered a call" in fleet.roster.missing())
            fleet.roster.join(other, TOKEN)
            assert (await call).stdout == "honest\n"


async def test_a_worker_without_room_gets_the_call_later_and_one_that_refuses_it_never():
    asked_of: list[str] = []

    async def full(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        asked_of.append("full")
        return (
            packed({"detail": "no room", "error": "full"}, status=503) if len(asked_of) < 3 else packed(honest(asked))
        )

    async with pretender(full) as worker, fronted(worker, patience=HASTY) as (fleet, url), SandboxClient(url) as client:
        assert (await client.run(ExecutionRequest(code="1"))).stdout == "honest\n"
        assert len(asked_of) == 3 and fleet.counts["retried"] == 0 and not fleet.roster.missing()

    refuses = lying(lambda asked: packed({"detail": "limits.cpu_s: 3 at most"}, status=422))
    async with pretender(refuses) as one, pretender(refuses) as two, fronted(one, two) as (fleet, url):
        await until(lambda: len(fleet.roster.serving()) == 2)
        async with SandboxClient(url) as client:
            with pytest.raises(SandboxLost, match=r"refuses the call: limits\.cpu_s: 3 at most"):
                await client.run(ExecutionRequest(code="1"))
        assert not fleet.roster.missing()  # a client cannot drive workers away


@pytest.mark.parametrize(
    "status, why",
    [
        ({"num_workers": 10**400, "level": "namespaces"}, "no number of ours"),
        ({"num_workers": True, "level": "namespaces"}, "not that of a sandbox server"),
        ({"num_workers": 1}, "not that of a sandbox server"),
        (["num_workers"], "not that of a sandbox server"),
        ({"num_workers": 1, "level": "process"}, "level process, which this front does not accept"),
        ({"num_workers": 1, "level": "landlock"}, "level landlock, which this front does not accept"),
    ],
)
async def test_a_worker_that_is_none_or_below_the_level_gets_nothing(status: object, why: str):
    async with pretender(tell, status) as worker, fronted(worker) as (fleet, _):
        if why == "no number of ours":
            await until(lambda: bool(fleet.roster.serving()))
            assert next(iter(fleet.roster)).slots == 512
            return
        await until(lambda: why in fleet.roster.missing())


async def test_the_answers_of_all_workers_share_one_room(monkeypatch: pytest.MonkeyPatch):
    inbox = link.Inbox()
    async with pretender(tell) as worker, link.Link(worker, "", inbox) as way:
        assert (await way.status(5.0)).slots == 1
        monkeypatch.setattr(link, "MAX_ANSWERS_BYTES", 10)
        with pytest.raises(link.Silent, match="too many large answers"):
            await way.status(5.0)
    assert inbox.held == 0


async def test_a_front_that_ends_tells_those_whom_it_has_not_answered_and_does_not_wait_for_their_programs():
    async def never(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(600)
        return web.Response()

    async with pretender(never) as worker:
        async with fronted(worker, patience=HASTY) as (fleet, url):
            calls = [asyncio.create_task(say(url, "/execute", {"code": "1", "call_id": name})) for name in "abc"]
            await until(lambda: (fleet.under_way, fleet.waiting) == (2, 1))  # one at work, one behind it
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 10.0
        for call in calls:
            assert await call == (503, {"detail": "the front closes", "error": "SandboxClosed"})


async def test_a_front_does_not_wait_at_its_end_for_a_worker_that_it_would_have_looked_at_again_later():
    status = {"num_workers": 1, "level": "namespaces"}
    async with pretender(tell, status) as worker:
        roster = Roster({IsolationLevel.NAMESPACES}, HASTY, lambda: None)
        roster.join(worker, TOKEN)
        await until(lambda: bool(roster.serving()))
        (known,) = roster
        known.faults = 9  # it is left alone for the longest time
        known.calls.add(asyncio.create_task(asyncio.sleep(600)))
        roster.leave(worker)
        status["level"] = "process"
        await until(lambda: not list(roster))
        async with asyncio.timeout(5.0):
            await roster.close()


# Who may join


async def test_only_those_with_the_join_token_change_the_workers():
    async with pretender(tell) as worker, fronted() as (fleet, url):
        for path in ("/workers/join", "/workers/leave"):
            for token in ("", "wrong", TOKEN):
                assert (await say(url, path, {"address": worker}, token))[0] == 401
        assert not list(fleet.roster)
        assert (await say(url, "/workers/join", {"address": worker, "token": TOKEN})) == (200, {"address": worker})
        await until(lambda: bool(fleet.roster.serving()))
        async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as answer:
            told = await answer.json()
        assert told["missing"] == "" and told["num_workers"] == 1 and TOKEN not in str(told)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
            assert f'sandbox_worker_serving{{worker="{worker}"}} 1.0' in await answer.text()
    async with (
        fronted(worker, join_token="") as (_, url),
        aiohttp.ClientSession() as http,
        http.post(f"{url}/workers/join", json={"address": worker}) as answer,
    ):
        assert answer.status == 404


@pytest.mark.parametrize(
    "data, why",
    [
        ({"address": "http://node-7.cluster:8088"}, "--allow-worker"),
        ({"address": "http://169.254.169.254:80"}, "--allow-worker"),
        ({"address": "http://127.0.0.1:80/elsewhere"}, "a host and a port"),
        ({"address": "file:///etc/passwd"}, "another form"),
        ({"address": 7}, "no text"),
        ({"address": "http://127.0.0.1:8088", "token": "a\r\nb"}, "token"),
        ({"address": "http://127.0.0.1:8088", "reward": 1}, "no more"),
        ({}, "no text"),
    ],
)
async def test_a_worker_that_may_not_join_is_told_why(data: dict[str, Any], why: str):
    async with fronted() as (fleet, url):
        status, told = await say(url, "/workers/join", data)
        assert status == 422 and why in told["detail"] and not list(fleet.roster)


# To a client


async def test_without_a_worker_a_call_is_told_who_is_missing():
    async with fronted("http://127.0.0.1:9", patience=HASTY) as (_, url), SandboxClient(url) as client:
        with pytest.raises(SandboxLost, match=re.escape("missing: http://127.0.0.1:9 (nobody listens there)")):
            await client.run(ExecutionRequest(code="1"))


async def test_it_is_to_clients_as_any_server():
    ran: list[str] = []

    async def count(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        ran.append(asked["code"])
        return packed(honest(asked))

    async with pretender(count) as worker, fronted(worker) as (_, url):
        mine = {"code": "print('mine')", "call_id": "shared"}
        first, second = await asyncio.gather(*(say(url, "/execute", mine) for _ in "12"))
        assert first == second and first[1]["call_id"] == "shared" and ran == ["print('mine')"]
        status, told = await say(url, "/execute", {**mine, "code": "print('yours')"})
        assert status == 422 and "call_id" in told["detail"]
        assert (await say(url, "/run", {"type": "python", "solution": "1"}))[1]["stdout"] == "honest\n"
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/run", data=b"{}", headers={"Content-Type": "text/plain"}) as answer:
                assert answer.status == 415
            async with session.get(f"{url}/status", headers={"Host": "evil.example"}) as answer:
                assert answer.status == 421


@pytest.mark.slow
async def test_on_the_command_line_a_server_joins_a_front_and_leaves_it_when_it_is_told_to_end():
    fronting = started("sandbox", "front", "--port", "0", told=r"^front: http://127.0.0.1:(\d+)")
    try:
        join = ("--join", fronting.address, "--token", TOKEN)
        serving = await asyncio.to_thread(
            started, "sandbox", "serve", "--port", "0", "--workers", "1", *join, told=r":(\d+) level namespaces"
        )
        try:
            calls = asyncio.create_task(many(fronting.address, 30))
            async with aiohttp.ClientSession() as session:
                while True:
                    async with session.get(f"{fronting.address}/status") as answer:
                        if any(worker["answered"] >= 10 for worker in (await answer.json())["workers"]):
                            break
                    await asyncio.sleep(0.05)
                serving.process.terminate()
                assert await asyncio.to_thread(serving.process.wait, 60) == 0
                async with session.get(f"{fronting.address}/status") as answer:
                    told = await answer.json()
            assert (told["workers"], told["missing"]) == ([], "")
            calls.cancel()
        finally:
            serving.end()
    finally:
        fronting.end()
