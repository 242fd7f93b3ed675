"""The pool's promises: one answer per call, fairness, room, deadlines, and no lost processes."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rstar_ray.errors import SandboxClosed, SandboxError, SandboxFull, SandboxLate, SandboxLost
from rstar_ray.outcome import Outcome
from sandbox import call, supervision, worker_groups
from sandbox.pool import SandboxPool
from sandbox.processes import WorkerHandle
from sandbox.request import ExecutionRequest
from tests import derived
from tests.processes import descendants

pytestmark = [pytest.mark.isolated, pytest.mark.asyncio(loop_scope="session")]
LEAN = ("lean",)
REPOSITORY = Path(__file__).resolve().parents[2]
SLEEP = ExecutionRequest(code="import time\ntime.sleep(60)", limits=derived.program(wall_s=30.0))


def sleeping(seconds: float) -> ExecutionRequest:
    return ExecutionRequest(code=f"import time\ntime.sleep({seconds})\nprint('slept')")


def busy_workers(pool: SandboxPool) -> list[WorkerHandle]:
    assert pool._worker_groups is not None
    return [worker for group in pool._worker_groups.everyone() for worker in group.workers if worker.call]


async def until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.02)


async def busy_one_gets(pool: SandboxPool, number: signal.Signals) -> None:
    """The worker that runs the pool's only call, once there is one."""
    await until(lambda: busy_workers(pool))
    signal.pidfd_send_signal(busy_workers(pool)[0].channel.pidfd, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_or_wedged_worker_costs_a_second_run_and_nothing_else(number: signal.Signals):
    async with derived.pool(slots=1, warm=LEAN) as pool:
        call = asyncio.ensure_future(pool.run(sleeping(2.0)))
        await busy_one_gets(pool, number)
        result = await asyncio.wait_for(call, 60)
        stats = pool.stats()
    assert (result.outcome, result.stdout) == (Outcome.OK, "slept\n")
    assert (stats.retried, stats.workers_lost, sum(stats.finished.values())) == (1, 1, 2)  # with the self-test


async def test_a_dead_server_is_started_again_and_its_workers_serve_on():
    async with derived.pool(slots=1, warm=LEAN) as pool:
        server = pool._worker_groups["lean"].server
        assert server is not None and pool.server_ids == (server.pid,)
        os.kill(server.pid, signal.SIGKILL)
        assert (await pool.run(ExecutionRequest(code="print(1)"))).stdout == "1\n"
        await until(lambda: pool.stats().servers_lost == 1 and pool._worker_groups["lean"].server not in (None, server))


async def test_servers_that_were_killed_before_they_could_serve_do_not_end_the_pool():
    async with derived.pool(slots=1, warm=LEAN) as pool:
        groups = pool._worker_groups
        assert groups is not None
        group = groups["lean"]
        await until(lambda: group.workers and all(worker.ready for worker in group.workers))  # later it would count
        groups._python = "/bin/false"
        os.kill(pool.server_ids[0], signal.SIGKILL)
        await until(lambda: group.given_up)
        for worker in list(group.workers):
            groups.lose(group, worker, "the kernel wanted its memory")
        with pytest.raises(SandboxError, match="no lean server: it ended without a report"):
            await pool.run(ExecutionRequest(code="print(1)"))
        groups._python = sys.executable
        assert (await pool.run(ExecutionRequest(code="print(1)"))).stdout == "1\n"
        assert pool.stats().servers_lost == 4 and not group.failures


async def test_a_server_that_is_lost_now_and_then_is_always_started_again():
    async with derived.pool(slots=1, warm=LEAN) as pool:
        group = pool._worker_groups["lean"]
        await until(lambda: len(group.idle) == 2)
        for _ in range(4):
            server = group.server
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda server=server: group.server not in (None, server) and group.server.ready)


async def test_where_servers_do_not_start_the_workers_that_live_serve_on():
    async with derived.pool(slots=1, spare_workers=0, warm=LEAN) as pool:
        groups = pool._worker_groups
        running, waiting = pool.submit(SLEEP), pool.submit(sleeping(0.0))
        groups._python = "/bin/false"
        os.kill(pool.server_ids[0], signal.SIGKILL)
        await until(lambda: groups["lean"].given_up)
        new = pool.submit(sleeping(0.0))
        running.cancel()
        assert [(await call).stdout for call in (waiting, new)] == ["slept\n"] * 2


async def test_programs_go_to_the_lean_server_only_until_theirs_starts_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_groups, "RETRY_S", 0.0)
    program = ExecutionRequest(code="# numpy\nprint(1)")
    async with derived.pool(slots=1, warm=("lean", "numpy")) as pool:
        groups = pool._worker_groups
        group = groups["numpy"]
        await until(lambda: len(group.idle) == 2)
        groups._python = "/bin/false"
        os.kill(group.server.pid, signal.SIGKILL)
        await until(lambda: group.given_up)
        for worker in list(group.workers):
            groups.lose(group, worker, "the kernel wanted its memory")
        assert (await pool.run(program)).stdout == "1\n"
        await until(lambda: group.given_up)  # again: the program has started a server
        groups._python = sys.executable
        assert (await pool.run(program)).stdout == "1\n"
        await until(lambda: group.idle)
        assert len(pool.server_ids) == 2 and not group.failures


async def test_a_call_that_loses_every_worker_is_our_error_not_the_programs():
    async with derived.pool(slots=1, attempts=1, warm=LEAN) as pool:
        call = asyncio.ensure_future(pool.run(SLEEP))
        await busy_one_gets(pool, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await call


async def test_a_full_queue_refuses_at_once():
    async with derived.pool(slots=1, max_waiting=2, warm=LEAN) as pool:
        calls = [asyncio.ensure_future(pool.run(SLEEP)) for _ in range(3)]  # one runs, two wait
        await asyncio.sleep(0)
        with pytest.raises(SandboxFull):
            await pool.run(SLEEP)
        assert (pool.stats().running, pool.stats().waiting) == (1, 2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert (await pool.run(ExecutionRequest(code="print('free')"))).stdout == "free\n"


async def test_what_waits_is_bounded_in_bytes_too_and_holds_no_text_once_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call, "MAX_TEXT_BYTES", 1_000_000)
    long = ExecutionRequest(code="print(len(input()))", stdin="x" * 600_000)
    async with derived.pool(slots=1, warm=LEAN) as pool:
        first = asyncio.ensure_future(pool.run(SLEEP))
        await until(lambda: pool.stats().running == 1)
        waits = pool.submit(long)
        with pytest.raises(SandboxFull, match="MiB of text"):
            await pool.run(long)
        waits.cancel()
        await asyncio.sleep(0)
        assert pool.stats().waiting == 0 and pool._worker_groups["lean"].queue.first().request.stdin == ""
        again = pool.submit(long)
        first.cancel()
        assert (await again).stdout == "600000\n"


async def test_callers_take_turns():
    async with derived.pool(slots=1, warm=LEAN) as pool:
        order: list[str] = []

        async def call(caller: str) -> None:
            await pool.run(ExecutionRequest(code="1"), caller)
            order.append(caller)

        await asyncio.gather(*[call("greedy") for _ in range(12)], *[call("modest") for _ in range(2)])
    assert max(index for index, caller in enumerate(order) if caller == "modest") < 6


async def test_a_deadline_counts_the_wait():
    async with derived.pool(slots=1, warm=LEAN) as pool:
        first = asyncio.ensure_future(pool.run(SLEEP))
        await asyncio.sleep(0)
        with pytest.raises(SandboxLate):
            await pool.run(ExecutionRequest(code="1", limits=derived.program(wall_s=0.1)), deadline_s=0.2)
        first.cancel()


async def test_a_deadline_does_not_cut_the_time_that_a_program_may_take():
    async with derived.pool(slots=1, warm=LEAN) as pool:
        assert (await pool.run(sleeping(0.3), deadline_s=0.05)).stdout == "slept\n"


async def test_cancelling_a_call_ends_its_program():
    async with derived.pool(slots=1, warm=LEAN) as pool:
        call = asyncio.ensure_future(pool.run(SLEEP))
        await until(lambda: pool.stats().running == 1)
        await asyncio.sleep(0.1)
        call.cancel()
        await until(lambda: pool.stats().running == 0)
        assert pool.stats().workers_lost == 0


async def test_closing_drains_then_ends_every_process():
    before = descendants()
    pool = derived.pool(slots=2, warm=LEAN)
    await pool.start()
    short = asyncio.ensure_future(pool.run(sleeping(0.3)))
    await asyncio.sleep(0)
    assert descendants() > before
    await pool.close(drain_s=30)
    assert (await short).stdout == "slept\n"
    with pytest.raises(SandboxClosed):
        await pool.run(ExecutionRequest(code="1"))
    await until(lambda: not descendants() - before)


async def test_draining_includes_a_call_whose_worker_dies():
    pool = derived.pool(slots=1, spare_workers=0, warm=LEAN)
    await pool.start()
    call = asyncio.ensure_future(pool.run(sleeping(0.5)))
    await until(lambda: busy_workers(pool))
    closing = asyncio.ensure_future(pool.close(drain_s=60))
    await busy_one_gets(pool, signal.SIGKILL)
    assert (await call).stdout == "slept\n" and pool.stats().retried == 1
    await closing


async def test_without_draining_waiting_calls_end_in_an_error():
    pool = derived.pool(slots=1, warm=LEAN)
    await pool.start()
    calls = [asyncio.ensure_future(pool.run(SLEEP)) for _ in range(3)]
    await asyncio.sleep(0.1)
    await pool.close()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, SandboxClosed) for end in ends)


async def test_a_burst_is_answered_once_each(pool: SandboxPool):
    results = await asyncio.gather(*[pool.run(ExecutionRequest(code=f"print({i})")) for i in range(300)])
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(300)]


async def test_workers_are_replaced_after_their_share_of_calls():
    async with derived.pool(slots=1, calls_per_worker=5, spare_workers=0, warm=LEAN) as pool:
        for i in range(12):
            assert (await pool.run(ExecutionRequest(code=f"print({i})"))).stdout == f"{i}\n"
        assert pool.stats().workers_replaced >= 2


async def test_a_shortage_of_descriptors_passes():
    """Supervision continues, and what died meanwhile is replaced once there is room again."""
    async with derived.pool(slots=1, spare_workers=0, warm=LEAN) as pool:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, hard))
        try:
            group = pool._worker_groups["lean"]
            signal.pidfd_send_signal(next(iter(group.workers)).channel.pidfd, signal.SIGKILL)
            os.kill(group.server.pid, signal.SIGKILL)
            await asyncio.sleep(1.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert pool._supervisor is not None and not pool._supervisor.done()
        assert (await pool.run(ExecutionRequest(code="print('back')"))).stdout == "back\n"


async def test_a_shortage_of_descriptors_uses_up_no_workers_numbers():
    async with derived.pool(slots=1, spare_workers=0, warm=LEAN) as pool:
        group = pool._worker_groups["lean"]
        await until(lambda: group.idle)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, hard))
        try:
            pool._worker_groups.replace(group, group.idle[0])
            for _ in range(200):  # as the supervisor does
                pool._worker_groups._fill(group)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: group.idle)
        assert group.idle[0].number < 100


async def test_a_pool_holds_no_more_descriptors_than_it_says():
    before = num_descriptors()
    async with derived.pool(slots=2, warm=("lean", "numpy")) as pool:
        await until(lambda: all(len(group.idle) == 3 for group in pool._worker_groups.everyone()))
        assert num_descriptors() - before <= pool.max_descriptors


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_an_impossible_level_refuses_to_start_with_the_fix():
    with pytest.raises(SandboxError, match="does not start"):
        await derived.pool(python="/bin/false", warm=LEAN).start()


async def test_want_of_time_is_said_and_costs_no_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody has refused anything, so namespaces are not blamed, and nothing less is taken in their place."""
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setattr(supervision, "START_S", 0.3)
    pool = derived.pool(python=str(slow), level="landlock", warm=LEAN)
    with pytest.raises(SandboxError, match=r"does not start: no worker within 0\.3 s\. Nothing was refused") as refused:
        await pool.start()
    assert "namespaces" not in str(refused.value) and "landlock" not in str(refused.value)
    assert pool.server_ids == ()


async def test_an_interpreter_that_cannot_be_started_is_named_and_no_level_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    locked = tmp_path / "python"
    locked.write_text("#!/bin/sh\n")
    locked.chmod(0o600)
    monkeypatch.setattr(supervision, "START_S", 5.0)  # this failure waits for nothing
    for python, problem in ((locked, "Permission denied"), (tmp_path / "absent", "No such file or directory")):
        pool = derived.pool(python=str(python), level="landlock", warm=LEAN)
        with pytest.raises(SandboxError, match=f"{python}: {problem}.*Hint: let this user read") as refused:
            await pool.start()
        assert "namespaces" not in str(refused.value) and "landlock" not in str(refused.value)


async def test_a_source_that_is_too_long_is_refused_not_run(pool: SandboxPool):
    result = await pool.run(ExecutionRequest(code="x=1\n" * 500_000))
    assert result.outcome is Outcome.INVALID and "characters" in result.reason


async def test_a_warm_server_reads_a_ping_and_an_order_that_come_as_one():
    async with derived.pool(slots=1, spare_workers=0, warm=("lean",)) as pool:
        group = pool._worker_groups["lean"]
        for _ in range(3):
            server = group.server
            os.kill(server.pid, signal.SIGSTOP)
            server.ping()
            pool._worker_groups.replace(group, group.idle.pop())
            os.kill(server.pid, signal.SIGCONT)
            assert (await pool.run(ExecutionRequest(code="print(1)"))).stdout == "1\n"
        assert pool.stats().servers_lost == 0 and group.server is server


async def test_a_worker_that_spoke_while_we_did_not_listen_is_not_silent():
    async with derived.pool(slots=1, spare_workers=0, warm=("lean",)) as pool:
        running = pool.submit(sleeping(1.5))
        group = pool._worker_groups["lean"]
        (worker,) = group.workers
        await asyncio.sleep(0.1)
        time.sleep(0.4)  # the loop is kept from listening, and a worker speaks every quarter of a second
        now = asyncio.get_running_loop().time()
        worker.last_heard = now - 1.6
        pool._worker_groups._check_worker(group, worker, now)
        assert (await running).stdout == "slept\n" and pool.stats().workers_lost == 0


LATE = """
import os, socket, time
from sandbox.jail import build
ours, theirs = socket.socketpair()
announce = build.announce
build.announce = lambda channel, pid: (time.sleep(0.3), announce(channel, pid))
if os.fork() == 0:
    if os.geteuid() == 0:
        os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
    try:
        build.enter(build.JailSpec("namespaces", [], 1 << 20, 100, 1 << 30, 64), 0, "/tmp", "", theirs)
        theirs.sendall(b"HELLO")
    except BaseException as error:
        theirs.sendall(repr(error).encode())
    os._exit(0)
theirs.close()
data, files, _, _ = socket.recv_fds(ours, 1, 1)
print(data, len(files), ours.recv(200))
"""


async def test_a_worker_says_nothing_before_it_is_announced():
    done = subprocess.run([sys.executable, "-c", LATE], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout == "b'\\x00' 1 b'HELLO'\n", done
