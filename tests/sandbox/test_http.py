"""The HTTP face: Code Judge's interface, our own route, and clients that send nonsense."""

import asyncio
import contextlib
import io
import json
import os
import resource
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import msgpack
import pytest
import pytest_asyncio

from rstar_ray.errors import ConfigError
from rstar_ray.outcome import Outcome
from rstar_ray.telemetry.registry import METRICS
from sandbox.http import connections, server
from sandbox.http import request_bodies as bodies
from sandbox.http.client import HttpSandbox
from sandbox.http.server import MSGPACK, ServerConfig, start_server
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest
from tests import derived

pytestmark = [pytest.mark.isolated, pytest.mark.asyncio(loop_scope="session")]
FIELDS = {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}


@contextlib.asynccontextmanager
async def serving(pool: SandboxPool, **settings: Any) -> AsyncGenerator[str]:
    runner, port = await start_server(pool, ServerConfig(port=0, **settings))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def connection(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def url(pool: SandboxPool) -> AsyncIterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "LINGER_S", 0.1)
        async with serving(pool, limits=derived.program(wall_s=40.0)) as address:  # for a busy machine
            yield address


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def python(solution: object, **more: object) -> dict[str, object]:
    return {"type": "python", "solution": solution, **more}


async def post(http: aiohttp.ClientSession, url: str, data: object):
    async with http.post(url, json=data) as answer:
        return answer.status, await answer.json()


async def test_a_program_runs_and_is_compared(http: aiohttp.ClientSession, url: str):
    status, answer = await post(http, f"{url}/run", python("print(input())", input="hi", expected_output="hi "))
    assert status == 200 and set(answer) == FIELDS
    assert (answer["success"], answer["run_success"], answer["stdout"]) == (True, True, "hi\n")
    _, answer = await post(http, f"{url}/run", python("print(1)", expected_output="2", sub_id="mine"))
    assert (answer["sub_id"], answer["success"], answer["run_success"]) == ("mine", False, True)


async def test_a_time_out_reads_as_in_code_judge(http: aiohttp.ClientSession, pool: SandboxPool):
    endless = python("print('so far', end='', flush=True)\nwhile True: pass", input="a", expected_output="a")
    async with serving(pool, limits=derived.program(cpu_s=0.2, wall_s=40.0)) as url:
        _, answer = await post(http, f"{url}/run", endless)
        _, verdict = await post(http, f"{url}/judge", endless)
    assert (answer["success"], answer["run_success"], answer["reason"]) == (False, False, "worker_timeout")
    assert answer["stdout"] == "so farSuicide from timeout.\n"
    assert set(verdict) == FIELDS - {"stdout", "stderr"} and verdict["reason"] == "worker_timeout"


async def test_a_body_may_begin_with_a_byte_order_mark(http: aiohttp.ClientSession, url: str):
    body = b"\xef\xbb\xbf" + json.dumps(python("\ufeffprint(3)")).encode()
    async with http.post(f"{url}/run", data=body, headers={"Content-Type": "application/json"}) as answer:
        assert (await answer.json())["stdout"] == "3\n"


async def test_batches_answer_every_entry_in_order_bad_ones_too(http: aiohttp.ClientSession, url: str):
    entries = [python(f"print({i})") for i in range(20)]
    entries[3] = {"type": "cobol", "solution": "x"}
    entries[5] = python(None)
    status, answer = await post(http, f"{url}/run/long-batch", {"type": "batch", "submissions": entries})
    assert status == 200
    reasons = [result["reason"] for result in answer["results"]]
    assert [i for i, reason in enumerate(reasons) if reason == "invalid_input"] == [3, 5]
    assert [r["stdout"] for i, r in enumerate(answer["results"]) if i not in (3, 5)] == [
        f"{i}\n" for i in range(20) if i not in (3, 5)
    ]


@pytest.mark.parametrize(
    "data",
    [
        [],
        "text",
        {"submissions": []},
        {"submissions": "x"},
        {"submissions": [1] * 100_000},
        {"submissions": {"a": 1}},
        None,
    ],
    ids=lambda value: str(type(value).__name__),
)
async def test_an_invalid_batch_is_refused(http: aiohttp.ClientSession, url: str, data: object):
    status, answer = await post(http, f"{url}/run/batch", data)
    assert status == 422 and answer["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"type": "python"}'])
async def test_a_body_that_is_not_a_request_is_refused(http: aiohttp.ClientSession, url: str, body: bytes):
    for kind in ("application/json", MSGPACK):
        async with http.post(f"{url}/run", data=body, headers={"Content-Type": kind}) as answer:
            assert answer.status == 422
            assert (await answer.json())["reason"] == "invalid_input"


async def test_a_body_that_is_not_packed_as_it_says_is_a_bad_request(http: aiohttp.ClientSession, url: str):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    for route in ("/run", "/run/batch", "/execute"):
        async with http.post(f"{url}{route}", data=b"this is no gzip", headers=headers, compress=False) as answer:
            assert answer.status == 400


async def test_msgpack_in_place_of_json(http: aiohttp.ClientSession, url: str):
    headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
    async with http.post(f"{url}/run", data=msgpack.packb(python("print(5)")), headers=headers) as answer:
        assert msgpack.unpackb(await answer.read())["stdout"] == "5\n"


async def test_status_ping_and_metrics(http: aiohttp.ClientSession, url: str):
    async with http.get(f"{url}/ping") as answer:
        assert await answer.json() == "pong"
    async with http.get(f"{url}/status") as answer:
        status = await answer.json()  # as Code Judge's client reads it, which accepts no further field
    assert status.pop("num_workers") > 0 and status == {"queue": 0}
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    assert 'sandbox_calls_total{outcome="ok"}' in text
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert {f"rstar_{name}" for name in typed} == {
        metric.exported_name for metric in METRICS if metric.group == "sandbox"
    }


async def test_a_client_that_goes_away_takes_its_programs_with_it(
    http: aiohttp.ClientSession, url: str, pool: SandboxPool
):
    batch = {"submissions": [python("import time\ntime.sleep(300)")] * 50}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(post(http, f"{url}/run/batch", batch), 0.3)
    for _ in range(1_200):
        if pool.stats().running == pool.stats().waiting == 0:
            break
        await asyncio.sleep(0.05)
    assert pool.stats().running == pool.stats().waiting == 0
    assert (await post(http, f"{url}/run", python("print(1)")))[1]["stdout"] == "1\n"


async def test_our_client_gets_whole_results_and_one_run_per_id(url: str, pool: SandboxPool):
    async with HttpSandbox(url) as client:
        result = await client.run(ExecutionRequest(code="3 * 4"))
        assert (result.outcome, result.value) == (Outcome.OK, "12")
        twice = [
            client.run(ExecutionRequest(code="import random\nprint(random.random())", call_id="one")) for _ in "12"
        ]
        first, second = await asyncio.gather(*twice)
        assert first.stdout == second.stdout
    async with HttpSandbox(url, timeout_s=0.1, attempts=1) as client:  # it waits for what the program may take
        slow = await client.run(ExecutionRequest(code="import time\ntime.sleep(0.5)\nprint(1)"))
        assert slow.stdout == "1\n"


async def test_other_addresses_need_a_token(pool: SandboxPool, http: aiohttp.ClientSession):
    with pytest.raises(ConfigError, match="SANDBOX_TOKEN"):
        ServerConfig(host="0.0.0.0")
    async with serving(pool, token="let-me-in") as url:
        status, _ = await post(http, f"{url}/run", python("1"))
        assert status == 401
        reader, writer = await connection(url)
        writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        async with HttpSandbox(url, token="let-me-in") as client:
            assert (await client.run(ExecutionRequest(code="print(2)"))).stdout == "2\n"


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "evil.example"}, 421),
    ],
)
async def test_a_web_page_can_run_nothing_here(
    http: aiohttp.ClientSession, url: str, pool: SandboxPool, headers: dict[str, str], status: int
):
    before = pool.stats().accepted
    sent = {"Content-Type": "application/json", **headers}
    async with http.post(f"{url}/run", data=json.dumps(python("print(1)")), headers=sent) as answer:
        assert answer.status == status, await answer.text()
    assert pool.stats().accepted == before + (status == 200)


async def test_a_name_that_points_here_reads_nothing(http: aiohttp.ClientSession, url: str):
    for route in ("/metrics", "/status", "/ping"):
        async with http.get(f"{url}{route}", headers={"Host": "rebound.example"}) as answer:
            assert answer.status == 421
    async with http.options(f"{url}/run", headers={"Origin": "http://evil.example"}) as answer:
        assert answer.status == 403


async def test_level_process_needs_a_token_on_the_loopback_too(http: aiohttp.ClientSession):
    async with derived.pool(only="process", slots=1, warm=("lean",)) as trusting:
        with pytest.raises(ConfigError, match="SANDBOX_TOKEN"):
            await start_server(trusting, ServerConfig(port=0))
        async with serving(trusting, token="let-me-in") as url:
            assert (await post(http, f"{url}/run", python("1")))[0] == 401


async def test_an_id_stands_for_one_program(http: aiohttp.ClientSession, url: str):
    mine = {"code": "print('mine')", "call_id": "shared"}
    assert (await post(http, f"{url}/execute", mine))[1]["stdout"] == "mine\n"
    assert (await post(http, f"{url}/execute", mine))[1]["stdout"] == "mine\n"
    for other in ({"code": "print('yours')"}, {"stdin": "x"}, {"limits": {"cpu_s": 1.0}}, {"seed": 3}):
        status, answer = await post(http, f"{url}/execute", {**mine, **other})
        assert status == 422 and "call_id" in answer["detail"] and "mine" not in answer["detail"]


@pytest.mark.parametrize(
    "limits, field",
    [
        ({"memory_bytes": 10**400}, "memory_bytes"),
        ({"memory_bytes": 3 << 30}, "memory_bytes"),
        ({"cpu_s": 61}, "cpu_s"),
        ({"wall_s": 1e308}, "wall_s"),
        ({"stdout_chars": 1 << 21}, "stdout_chars"),
        ({"cpu_s": "9" * 100_000}, "cpu_s"),
    ],
)
async def test_a_client_cannot_ask_for_more_than_the_owner_allows(
    http: aiohttp.ClientSession, url: str, limits: dict[str, object], field: str
):
    status, answer = await post(http, f"{url}/execute", {"code": "print(1)", "limits": limits})
    assert status == 422 and field in answer["detail"] and len(answer["detail"]) < 200


def head(length: int) -> bytes:
    lines = ("POST /run HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}")
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


async def test_a_body_too_large_is_refused_before_it_is_read(url: str):
    reader, writer = await connection(url)
    writer.write(head(1 << 30) + b"{" * 1000)
    assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_body_that_does_not_come_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "PAUSE_S", 0.2)
    reader, writer = await connection(url)
    writer.write(head(100) + b"{")
    assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 408 ")
    writer.close()


@pytest.mark.parametrize(
    "kind, body",
    [
        ("application/json", b"[" + b"[]," * 2_000_000 + b"1]"),
        ("application/json", ("[" + "1," * 4_000_000 + "1]").encode("utf-16")),
        ("application/json", b'{"type": "python", "solution": "1", ' + b'"a": [],' * 1_500_000 + b'"b": 1}'),
        (MSGPACK, b"\xdd" + (3_000_000).to_bytes(4, "big") + b"\x90" * 3_000_000),
        (MSGPACK, b"\xdc\x01\x00" + (b"\xdc\xff\xff" + b"\x01" * 65_535) * 256),
        (MSGPACK, (b"\xdd\x00\xff\xff\xff" * 200) + b"\xdf\xff\xff\xff\xff" + b"\x01" * 100_000),
    ],
    ids=["lists", "utf-16", "fields", "one list", "many lists", "room that is announced"],
)
async def test_a_body_of_millions_of_values_is_refused_before_they_are_made(
    http: aiohttp.ClientSession, url: str, kind: str, body: bytes
):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with http.post(f"{url}/run", data=io.BytesIO(body), headers={"Content-Type": kind}) as answer:
        assert answer.status == 422
        detail = (await answer.json())["detail"]
    assert "more than 2000000 values" in detail or "exceeds max_" in detail
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 150_000  # KiB; made, they would take 200 to 500


JSON_HEAD = b"POST /run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /ping HTTP/1.1\r\n" + b"X: y\r\n" * 100_000,
        b"GET /" + b"a" * 1_000_000,
        JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + b"X: y\r\n" * 100_000,
        JSON_HEAD + b'Content-Length: 0\r\nContent-Length: 39\r\n\r\n{"type":"python","solution":"print(1)"}',
        b"GET /status HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    ],
    ids=["headers", "a line", "trailers", "two lengths", "two hosts"],
)
async def test_what_has_no_end_or_two_meanings_is_a_bad_request(
    url: str, sent: bytes, caplog: pytest.LogCaptureFixture
):
    reader, writer = await connection(url)
    writer.write(sent)
    assert (await asyncio.wait_for(reader.read(30), 60)).startswith(b"HTTP/1.0 400 ")
    writer.transport.abort()
    assert caplog.text == ""  # nobody's garbage is written to our disk


async def test_idle_connections_make_room_for_those_that_ask(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "room_for_connections", lambda _: 8)
    async with serving(pool) as url:
        idle = [await connection(url) for _ in range(30)]
        async with aiohttp.ClientSession() as http:
            for _ in range(3):
                async with http.get(f"{url}/status") as answer:
                    assert answer.status == 200
        ends = [reader.at_eof() or reader.exception() is not None for reader, _ in idle]
        assert sum(ends) >= 22
        for _, writer in idle:
            writer.close()


async def test_connections_leave_the_pool_the_descriptors_that_it_needs(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
):
    rooms: list[int] = []
    limit = len(os.listdir("/proc/self/fd")) + pool.max_descriptors + 200  # noqa: PTH208
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(server, "ConnectionRoom", lambda most: rooms.append(most) or connections.ConnectionRoom(most))
    async with serving(pool):
        pass
    assert 100 < rooms[0] <= 200 - connections.RESERVED


async def test_a_connection_that_never_asks_is_closed(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADERS_S", 0.1)
    async with serving(pool) as url:
        reader, writer = await connection(url)
        writer.write(b"GET /status HT")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_cpp_is_compiled_and_run_in_the_sandbox(http: aiohttp.ClientSession, url: str):
    source = '#include <cstdio>\nint main(){int a; std::scanf("%d", &a); std::printf("%d\\n", a * 2);}'
    submission = {"type": "cpp", "solution": source, "input": "21", "expected_output": "42"}
    _, answer = await post(http, f"{url}/run", submission)
    if "not installed" in answer["stderr"]:
        pytest.skip("no g++ here")
    assert answer["success"], answer


@pytest.mark.parametrize(
    "more, rest",
    [
        ("", b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000),
        ("Connection: Upgrade\r\nUpgrade: websocket\r\n", bytes(1 << 16)),
    ],
    ids=["requests", "another protocol"],
)
async def test_what_is_sent_while_a_program_runs_is_not_taken_in(url: str, more: str, rest: bytes):
    """The sender has to wait; what neither has read lies in the two sockets. The last: its program keeps a worker."""
    body = json.dumps({"code": "import time\ntime.sleep(6)"}).encode()
    _, writer = await connection(url)
    head = f"POST /execute HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 64 << 20:
            writer.write(rest)
            await asyncio.wait_for(writer.drain(), 1)
            sent += len(rest)
    writer.transport.abort()
