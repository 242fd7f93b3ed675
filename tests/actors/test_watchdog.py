"""The watchdog with fakes in place of actors; no Ray. The process that is killed is a real one."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError

from actors import remote
from actors.cluster.process_start import start_time
from actors.health import watchdog
from actors.health.heartbeat import Heartbeat, runnable_wait_s, starved_s
from actors.health.watchdog import Watchdog
from actors.service import Service
from rstar_ray.config import DetectorConfig
from rstar_ray.deadline import within
from rstar_ray.errors import RStarError
from rstar_ray.run_dir.durable import read_json
from tests.logged import Logged
from tests.processes import wait_for_end

CONFIG = DetectorConfig(probe_every_s=0.1, silent_s=0.4, learner_silent_s=0.4, engine_step_s=0.4, still_s=60)
LOST_SERVER = {"msg": "1 servers of its pool were lost", "levelno": 30, "name": "sandbox.worker_groups"}
HEARTBEAT = Heartbeat(incarnation="first", node_id="node", pid=1, start_time="then")


class Actor:
    """Answers, keeps silent, or fails, as set."""

    def __init__(self) -> None:
        self.probe = self
        self.fault: Exception | None = None
        self.silent = False
        self.asked = 0
        self.heartbeat = HEARTBEAT

    def remote(self) -> Any:
        return self._answer()

    async def _answer(self) -> Heartbeat:
        self.asked += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.fault is not None:
            raise self.fault
        return replace(self.heartbeat, progress=self.asked)


class Run:
    """A watchdog, what it showed, and which actors it killed."""

    def __init__(self, logged: Logged, config: DetectorConfig = CONFIG) -> None:
        self.shown = logged
        logged.listeners.append(lambda line: self.changed.set())
        self.killed: list[Any] = []
        self.changed = asyncio.Event()
        self.watchdog = Watchdog(config)
        self.watchdog.start()

    def follow(self, name: str, actor: Actor, *, silent_s: float = 0.3, serves: bool = True) -> Service[Any]:
        service = Service[Any](actor, name, silent_s=silent_s)
        if serves:
            service.serves()
        self.watchdog.follow(service)
        return service

    def kill(self, handle: Any, *, no_restart: bool) -> None:
        assert not no_restart
        self.killed.append(handle)

    async def happens(self) -> None:
        await asyncio.wait_for(self.changed.wait(), 60)
        self.changed.clear()

    async def kills(self, number: int) -> None:
        async with asyncio.timeout(60):
            while len(self.killed) < number:
                await asyncio.sleep(0.01)


@pytest.fixture
async def run(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    started = Run(logged)
    monkeypatch.setattr(remote.ray, "kill", started.kill)
    yield started
    await started.watchdog.close()


async def test_a_silent_process_is_killed_with_a_line_that_says_what_was_seen(run: Run):
    healthy, stuck = Actor(), Actor()
    run.follow("healthy", healthy)
    run.follow("stuck", stuck)
    while stuck.asked < 2:
        await asyncio.sleep(0.01)
    stuck.silent = True
    await run.kills(1)
    assert run.killed == [stuck]
    (line,) = run.shown
    assert line.startswith("stuck was silent for 0.") and "process 1 is killed" in line


async def test_a_long_start_says_what_it_waits_for(run: Run, monkeypatch: pytest.MonkeyPatch):
    def lines() -> list[str]:
        run.watchdog.tick()
        run.watchdog.tick()
        return [line for line in run.shown if line.startswith("still starting")]

    rank = run.follow("learner/rank-0", Actor(), serves=False)
    loading = asyncio.create_task(
        within(asyncio.Event().wait(), 60, waiter="driver", owner="learner/rank-0", reason="loading the model")
    )
    await asyncio.sleep(0)
    assert lines() == []  # not before its interval
    monkeypatch.setattr(watchdog, "START_SHOWN_EVERY_S", 0.0)
    found = lines()
    assert found and found[-1].endswith("s for learner/rank-0 (loading the model)")
    rank.serves()
    assert lines() == found
    loading.cancel()


@pytest.mark.long
async def test_a_service_that_does_not_come_back_is_killed_again_and_again_whatever_its_process_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    """As where the process that Ray starts in its place is stopped before its first answer."""
    monkeypatch.setattr(watchdog, "RESTART_S", 0.1)
    actor, starts = Actor(), Actor()
    starts.fault = ActorUnavailableError("it starts", None)
    run.follow("actor", actor)
    run.follow("starts", starts, serves=False)
    while actor.asked < 2:
        await asyncio.sleep(0.01)
    actor.fault = ActorUnavailableError("it restarts", None)
    await run.kills(2)
    assert run.killed == [actor] * 2
    lines = [line for line in run.shown if "did not come back" in line]
    assert "(limit 0.4 s)" in lines[0] and "(limit 0.8 s)" in lines[1]  # an honest start may be slow
    actor.fault = None
    while "actor answers again" not in run.shown:
        await run.happens()
    actor.silent = True
    await run.kills(3)
    assert "(limit 0.3 s)" in run.shown[-1]


async def test_a_service_that_its_owner_calls_lost_has_more_time_for_its_next_process(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "RESTART_S", 0.1)
    actor = Actor()
    service = run.follow("actor", actor)
    while not run.watchdog.heartbeats():
        await asyncio.sleep(0.01)
    actor.silent = True
    service.lost()
    run.watchdog.follow(service)
    await run.kills(1)
    (line,) = run.shown
    assert line.startswith("actor did not come back, silent for 0.") and "(limit 0.4 s)" in line


async def test_the_restart_of_a_service_calls_back(run: Run):
    actor, restarts = Actor(), asyncio.Queue[None]()
    run.follow("balancer", actor).on_restart = lambda: restarts.put_nowait(None)
    while actor.asked < 2:
        await asyncio.sleep(0.01)
    assert restarts.empty()
    actor.heartbeat = replace(HEARTBEAT, incarnation="second")
    await asyncio.wait_for(restarts.get(), 60)


@pytest.mark.long
async def test_an_actor_whose_probe_fails_answers_all_the_same_and_is_not_killed_for_silence(run: Run):
    actor = Actor()
    actor.fault = RayTaskError("probe", "Traceback\nKeyError: 'memory'", KeyError("memory")).as_instanceof_cause()
    run.follow("actor", actor)
    while actor.asked < 7:
        await asyncio.sleep(0.01)
    assert run.shown == ["actor answers, but its probe fails: KeyError: 'memory'"]
    assert not run.killed
    actor.fault, actor.silent = None, True
    await run.kills(1)


async def test_an_answer_that_was_lost_with_its_node_is_not_a_death_and_is_asked_for_again(run: Run):
    actor = Actor()
    actor.fault = ObjectLostError("ref", None, "")
    run.follow("actor", actor)
    while actor.asked < 3:
        await asyncio.sleep(0.01)
    actor.fault = None
    while "actor answers again" not in run.shown:
        await run.happens()
    assert not run.killed


async def test_a_process_that_cannot_be_killed_is_named_and_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch):
    def refuse(handle: Any, **_: Any) -> None:
        raise ConnectionError("no head")

    monkeypatch.setattr(remote.ray, "kill", refuse)
    actor = Actor()
    actor.silent = True
    run.follow("actor", actor)
    while run.shown.count("actor could not be killed: ConnectionError: no head") < 2:
        await run.happens()


async def test_a_watchdog_that_fails_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(run.watchdog, "tick", fail)
    with pytest.raises(RStarError, match="the watchdog has failed: KeyError: 'a bug'"):
        await asyncio.wait_for(run.watchdog.guard(asyncio.Event().wait()), 60)


async def test_a_death_for_good_calls_back_or_is_shown(run: Run):
    actor, deaths = Actor(), asyncio.Queue[Exception]()
    actor.fault = ActorDiedError()
    run.follow("rank", actor).on_death = deaths.put_nowait
    assert isinstance(await asyncio.wait_for(deaths.get(), 60), ActorDiedError) and not run.killed
    run.follow("balancer", actor, serves=False)  # whoever starts it reports its death
    run.follow("tools/a:b/0", actor)
    await run.happens()
    assert len(run.shown) == 1 and run.shown[0].startswith("tools/a:b/0 has ended and is not restarted: ")


async def test_the_runs_processes_are_recorded(tmp_path: Path):
    path = tmp_path / "processes.json"
    watchdog = Watchdog(CONFIG, record=path)
    watchdog.start()
    service = Service[Any](Actor(), "engine", silent_s=10)
    watchdog.follow(service)
    while not watchdog.heartbeats():
        await asyncio.sleep(0.01)
    service.serves()
    watchdog.follow(service)
    process = {"incarnation": "first", "node_id": "node", "pid": 1, "start_time": "then", "children": []}
    assert read_json(path) == {"engine": process}
    await watchdog.close()


async def test_a_process_that_replaces_one_that_died_is_shown_and_so_are_its_own_lines(run: Run):
    actor = Actor()
    run.follow("balancer", actor)
    while actor.asked < 2:
        await asyncio.sleep(0.01)
    actor.heartbeat = replace(HEARTBEAT, incarnation="another", pid=2)
    await run.happens()
    actor.heartbeat = replace(HEARTBEAT, incarnation="another", pid=2, records=(logging.makeLogRecord(LOST_SERVER),))
    await run.happens()
    assert run.shown[:2] == [
        "balancer died: process 2 replaces process 1", "balancer: 1 servers of its pool were lost"
    ]  # fmt: skip
    assert not run.killed


async def test_a_service_that_it_has_left_is_not_judged(run: Run):
    actor = Actor()
    actor.silent = True
    run.watchdog.leave(run.follow("actor", actor))
    await asyncio.sleep(0.5)
    assert not run.killed


async def test_a_run_without_progress_ends_naming_its_oldest_wait(logged: Logged):
    run = Run(logged, replace(CONFIG, still_s=0.6))

    async def wait_for_ever() -> None:
        await within(asyncio.Event().wait(), 100, waiter="train loop", owner="generation", reason="3 rollouts")

    with pytest.raises(RStarError, match=r"no progress, .*train loop has waited 1 s for generation \(3 rollouts\)"):
        await asyncio.wait_for(run.watchdog.guard(wait_for_ever()), 60)
    assert len(run.shown) == 1 and "train loop has waited 0 s for generation" in run.shown[0]
    await run.watchdog.close()


def test_a_stopped_process_is_killed_and_none_that_merely_has_its_id(monkeypatch: pytest.MonkeyPatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        began = start_time(child.pid)
        child.send_signal(signal.SIGSTOP)
        replace(HEARTBEAT, pid=child.pid, start_time=start_time(os.getpid())).kill()
        assert child.poll() is None
        booted_s = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 3_600)  # the clock was set
        replace(HEARTBEAT, pid=child.pid, start_time=began).kill()
        assert child.wait(60) == -signal.SIGKILL
        replace(HEARTBEAT, pid=child.pid, start_time=began).kill()  # gone already
    finally:
        child.kill()
        child.wait()


SPIN = (
    "import os, time\nos.sched_setaffinity(0, {CORE})\nend = time.monotonic() + 60\nwhile time.monotonic() < end: ..."
)


@pytest.mark.long
def test_a_process_that_gets_no_core_is_distinguished_from_one_that_is_stopped():
    """Two that spin on one core each wait half of the time; a stopped one waits for nothing."""
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", SPIN.replace("CORE", str(core))]
    spinning, stopped = (subprocess.Popen(command) for _ in range(2))
    try:
        time.sleep(1.0)
        before = runnable_wait_s(spinning.pid)
        time.sleep(1.0)
        waited_s = starved_s(before, runnable_wait_s(spinning.pid))
        assert waited_s > 0.2
        stopped.send_signal(signal.SIGSTOP)
        while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:  # it needs a core to stop
            time.sleep(0.01)
        before = runnable_wait_s(stopped.pid)
        time.sleep(1.0)
        assert starved_s(before, runnable_wait_s(stopped.pid)) == 0
    finally:
        for process in (spinning, stopped):
            process.kill()
            process.wait()


async def test_a_head_that_is_given_up_ends_the_run_and_is_named():
    class Head:
        answer = None

        def start(self) -> None: ...
        def close(self) -> None: ...
        def look(self) -> None: ...
        def fault(self) -> str:
            return "Ray's head has not answered"

    gone = Watchdog(CONFIG, head=Head())  # type: ignore[arg-type]
    gone.start()
    with pytest.raises(RStarError, match="Ray's head has not answered"):
        await asyncio.wait_for(gone.guard(asyncio.Event().wait()), 60)
    await gone.close()


ORPHAN = """
import os, time
from actors.health.heartbeat import end_with_parent
end_with_parent(0.2, 0.05)
print(os.getpid(), flush=True)
time.sleep(600)
"""
RAYLET = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.stdout.readline().decode())
"""


@pytest.mark.long
def test_an_actor_ends_some_time_after_its_raylet_where_ray_does_not_end_it():
    """Its end waits for the head's answer."""
    parent = subprocess.run([sys.executable, "-c", RAYLET, ORPHAN], stdout=subprocess.PIPE, timeout=60, check=True)
    wait_for_end(int(parent.stdout))
