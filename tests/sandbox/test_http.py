"""The HTTP face: Code Judge's interface, our own route, and clients that send nonsense."""

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import msgpack
import pytest
import pytest_asyncio

from rstar_ray.errors import ConfigError
from rstar_ray.outcome import Outcome
from sandbox.http.client import SandboxClient
from sandbox.http.server import MSGPACK, ServerConfig, start_server
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")
FIELDS = {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def url(pool: SandboxPool) -> AsyncIterator[str]:
    runner, port = await start_server(pool, ServerConfig(port=0))
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


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


async def test_a_long_output_is_compared_whole_and_shown_cut(http: aiohttp.ClientSession, url: str):
    expected = "7" * 5000
    _, answer = await post(http, f"{url}/run", python("print('7' * 5000)", expected_output=expected))
    assert answer["success"] and len(answer["stdout"]) < 1100


async def test_a_failing_program_says_why(http: aiohttp.ClientSession, url: str):
    _, answer = await post(http, f"{url}/run", python("1/0"))
    assert not answer["success"] and answer["stderr"].endswith("division by zero\n") and answer["reason"] == ""


async def test_a_time_out_reads_as_in_code_judge(http: aiohttp.ClientSession, url: str):
    endless = python("print('so far', end='', flush=True)\nwhile True: pass", input="a", expected_output="a")
    _, answer = await post(http, f"{url}/run", endless)
    assert (answer["success"], answer["run_success"], answer["reason"]) == (False, False, "worker_timeout")
    assert answer["stdout"] == "so farSuicide from timeout.\n"
    assert set((await post(http, f"{url}/judge", endless))[1]) == FIELDS - {"stdout", "stderr"}


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


async def test_verdicts_leave_the_output_out(http: aiohttp.ClientSession, url: str):
    _, answer = await post(http, f"{url}/judge", python("print(1)", expected_output="1"))
    assert set(answer) == FIELDS - {"stdout", "stderr"} and answer["success"]
    _, answer = await post(http, f"{url}/judge/batch", {"submissions": [python("print(1)")]})
    assert answer["results"][0]["success"]


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
async def test_a_batch_that_is_none_is_refused(http: aiohttp.ClientSession, url: str, data: object):
    status, answer = await post(http, f"{url}/run/batch", data)
    assert status == 422 and answer["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"type": "python"}'])
async def test_a_body_that_is_no_request_is_refused(http: aiohttp.ClientSession, url: str, body: bytes):
    for kind in ("application/json", MSGPACK):
        async with http.post(f"{url}/run", data=body, headers={"Content-Type": kind}) as answer:
            assert answer.status == 422
            assert (await answer.json())["reason"] == "invalid_input"


async def test_a_body_that_is_not_packed_as_it_says_is_a_bad_request(http: aiohttp.ClientSession, url: str):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    for route in ("/run", "/run/batch", "/execute"):
        async with http.post(f"{url}{route}", data=b"this is no gzip", headers=headers, compress=False) as answer:
            assert answer.status == 400


async def test_a_refusal_always_has_a_reason(http: aiohttp.ClientSession, url: str):
    async with http.post(f"{url}/run", data=b"\xc1", headers={"Content-Type": MSGPACK}) as answer:
        assert answer.status == 422
        assert not (await answer.json())["detail"].strip().endswith(":")


async def test_null_is_no_stdin(http: aiohttp.ClientSession, url: str):
    status, answer = await post(http, f"{url}/execute", {"code": "input()", "stdin": None})
    assert status == 200 and "EOFError" in answer["stderr"]


async def test_surrogates_and_nul_pass_both_ways(http: aiohttp.ClientSession, url: str):
    _, answer = await post(http, f"{url}/run", python("print('a\\0b\\ud800', repr(input()))", input="\ud800"))
    assert answer["stdout"].startswith("a\x00b\\ud800")


async def test_msgpack_in_place_of_json(http: aiohttp.ClientSession, url: str):
    headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
    async with http.post(f"{url}/run", data=msgpack.packb(python("print(5)")), headers=headers) as answer:
        assert msgpack.unpackb(await answer.read())["stdout"] == "5\n"


async def test_status_ping_and_metrics(http: aiohttp.ClientSession, url: str):
    async with http.get(f"{url}/ping") as answer:
        assert await answer.json() == "pong"
    async with http.get(f"{url}/status") as answer:
        assert set(await answer.json()) == {"queue", "num_workers"}
    async with http.get(f"{url}/metrics") as answer:
        assert 'sandbox_calls_total{outcome="ok"}' in await answer.text()


async def test_a_client_that_goes_away_takes_its_programs_with_it(
    http: aiohttp.ClientSession, url: str, pool: SandboxPool
):
    batch = {"submissions": [python("import time\ntime.sleep(30)")] * 50}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(post(http, f"{url}/run/batch", batch), 0.3)
    for _ in range(200):
        if pool.stats().running == pool.stats().waiting == 0:
            break
        await asyncio.sleep(0.05)
    assert pool.stats().running == pool.stats().waiting == 0
    assert (await post(http, f"{url}/run", python("print(1)")))[1]["stdout"] == "1\n"


async def test_our_client_gets_whole_results_and_one_run_per_id(url: str, pool: SandboxPool):
    async with SandboxClient(url) as client:
        result = await client.run(ExecutionRequest(code="3 * 4"))
        assert (result.outcome, result.value) == (Outcome.OK, "12")
        twice = [
            client.run(ExecutionRequest(code="import random\nprint(random.random())", call_id="one")) for _ in "12"
        ]
        first, second = await asyncio.gather(*twice)
        assert first.stdout == second.stdout


async def test_other_addresses_need_a_token(pool: SandboxPool, http: aiohttp.ClientSession):
    with pytest.raises(ConfigError, match="token"):
        ServerConfig(host="0.0.0.0")
    runner, port = await start_server(pool, ServerConfig(port=0, token="let-me-in"))
    try:
        status, _ = await post(http, f"http://127.0.0.1:{port}/run", python("1"))
        assert status == 401
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        async with SandboxClient(f"http://127.0.0.1:{port}", token="let-me-in") as client:
            assert (await client.run(ExecutionRequest(code="print(2)"))).stdout == "2\n"
    finally:
        await runner.cleanup()


async def test_cpp_is_compiled_and_run_in_the_cage(http: aiohttp.ClientSession, url: str):
    source = '#include <iostream>\nint main(){int a; std::cin >> a; std::cout << a * 2 << "\\n";}'
    submission = {"type": "cpp", "solution": source, "input": "21", "expected_output": "42"}
    _, answer = await post(http, f"{url}/run", submission)
    if "not installed" in answer["stderr"]:
        pytest.skip("no g++ here")
    assert answer["success"], answer
