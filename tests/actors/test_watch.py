"""The detector at work, with fakes in place of actors; no Ray. The process it ends is a real one."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError

from actors.cluster.process_start import birth
from actors.health import watchdog as watch
from actors.health.heartbeat import Sign, starved_s, waits_for_cores_s
from actors.health.watchdog import Watch, kill_here
from rstar_ray.config import DetectorConfig
from rstar_ray.deadline import within
from rstar_ray.errors import RStarError
from tests.logged import Logged

CONFIG = DetectorConfig(probe_every_s=0.1, silent_s=0.4, learner_silent_s=0.4, engine_step_s=0.4, still_s=60)
SIGN = Sign(life="life", node_id="node", pid=1, birth="then")


class Actor:
    """Answers, keeps silent, or fails, as told."""

    def __init__(self) -> None:
        self.probe = self
        self.fault: Exception | None = None
        self.silent = False
        self.asked = 0
        self.sign = SIGN

    def remote(self) -> Any:
        return self._answer()

    async def _answer(self) -> Sign:
        self.asked += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.fault is not None:
            raise self.fault
        return replace(self.sign, progress=self.asked)


class Run:
    """A watch, what it showed, and whom it ended."""

    def __init__(self, logged: Logged, config: DetectorConfig = CONFIG) -> None:
        self.shown = logged
        logged.listeners.append(lambda line: self.changed.set())
        self.ended: list[tuple[Any, Sign | None]] = []
        self.changed = asyncio.Event()
        self.watch = Watch(config, end=self._end)
        self.watch.start()

    async def _end(self, handle: Any, sign: Sign | None) -> None:
        self.ended.append((handle, sign))
        self.changed.set()

    async def happens(self) -> None:
        await asyncio.wait_for(self.changed.wait(), 60)
        self.changed.clear()


@pytest.fixture
async def run(logged: Logged) -> AsyncIterator[Run]:
    started = Run(logged)
    yield started
    await started.watch.close()


async def test_a_silent_actor_is_ended_by_its_process_with_a_line_that_says_what_was_seen(run: Run):
    healthy, wedged = Actor(), Actor()
    run.watch.follow("healthy", healthy, silent_s=0.3)
    run.watch.follow("wedged", wedged, silent_s=0.3)
    while wedged.asked < 2:
        await asyncio.sleep(0.01)
    wedged.silent = True
    await run.happens()
    assert [(handle, sign.pid) for handle, sign in run.ended if sign] == [(wedged, 1)]
    (line,) = run.shown
    assert line.startswith("wedged was silent for 0.") and "process 1 is killed" in line


@pytest.mark.long
async def test_an_actor_that_served_and_does_not_come_back_is_ended_again_and_again_whatever_its_process_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    """As where the process that Ray starts in its place is stopped before its first answer."""
    monkeypatch.setattr(watch, "BACK_S", 0.3)
    actor, starts = Actor(), Actor()
    starts.fault = ActorUnavailableError("it starts", None)
    run.watch.follow("actor", actor, silent_s=0.3)
    run.watch.follow_start("starts", starts, silent_s=0.3)
    while actor.asked < 2:
        await asyncio.sleep(0.01)
    actor.fault = ActorUnavailableError("it restarts", None)
    while len(run.ended) < 2:
        await run.happens()
    assert run.ended == [(actor, None)] * 2
    lines = [line for line in run.shown if "did not come back" in line]
    assert len(lines) == 2 and lines[0].startswith("actor did not come back, silent for 0.")
    actor.fault = None
    while "actor answers again" not in run.shown:
        await run.happens()
    actor.silent = True
    while len(run.ended) < 3:
        await run.happens()
    assert run.ended[2][1] is not None and "(limit 0.3 s)" in run.shown[-1]


@pytest.mark.long
async def test_an_actor_whose_probe_fails_answers_all_the_same_and_is_not_killed_for_silence(run: Run):
    actor = Actor()
    actor.fault = RayTaskError("probe", "Traceback\nKeyError: 'memory'", KeyError("memory")).as_instanceof_cause()
    run.watch.follow("actor", actor, silent_s=0.3)
    while actor.asked < 7:
        await asyncio.sleep(0.01)
    assert run.shown == ["actor answers, and cannot say how it is: KeyError: 'memory'"]
    assert not run.ended
    actor.fault, actor.silent = None, True
    run.changed.clear()
    await run.happens()
    assert len(run.ended) == 1


async def test_an_answer_that_was_lost_with_its_node_is_no_death_and_is_asked_for_again(run: Run):
    actor = Actor()
    actor.fault = ObjectLostError("ref", None, "")
    run.watch.follow("actor", actor, silent_s=0.3)
    while actor.asked < 3:
        await asyncio.sleep(0.01)
    actor.fault = None
    while "actor answers again" not in run.shown:
        await run.happens()
    assert not run.ended


async def test_a_process_that_cannot_be_killed_is_named_and_tried_again(logged: Logged):
    run, tries = Run(logged), list[str]()

    async def refuse(handle: Any, sign: Sign | None) -> None:
        tries.append("kill")
        raise ConnectionError("no head")

    run.watch._end_process = refuse
    actor = Actor()
    actor.silent = True
    run.watch.follow("actor", actor, silent_s=0.3)
    while len(tries) < 2:
        await run.happens()
    assert "actor could not be killed: ConnectionError: no head" in run.shown
    await run.watch.close()


async def test_a_detector_that_fails_ends_the_run_and_not_in_silence(run: Run, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(run.watch, "tick", fail)
    with pytest.raises(RStarError, match="the detector has failed: KeyError: 'a bug'"):
        await asyncio.wait_for(run.watch.guard(asyncio.Event().wait()), 60)


async def test_a_death_for_good_is_told_while_nobody_waits_for_the_actor(run: Run):
    actor, told = Actor(), asyncio.Queue[tuple[str, Exception]]()
    actor.fault = ActorDiedError()
    run.watch.follow("rank", actor, silent_s=0.3, on_death=lambda *death: told.put_nowait(death))
    name, death = await asyncio.wait_for(told.get(), 60)
    assert name == "rank" and isinstance(death, ActorDiedError) and not run.ended


async def test_a_death_for_good_that_nobody_is_told_of_is_shown(run: Run):
    actor = Actor()
    actor.fault = ActorDiedError()
    run.watch.follow("tools/a:b/0", actor, silent_s=0.3)
    await run.happens()
    assert len(run.shown) == 1 and run.shown[0].startswith("tools/a:b/0 is gone for good: ")
    run.watch.follow_start("balancer", actor, silent_s=0.3)  # who starts it says so
    await asyncio.sleep(0.1)
    assert len(run.shown) == 1


async def test_another_process_in_the_place_of_one_that_died_is_shown_and_so_is_what_it_says_itself(run: Run):
    actor = Actor()
    run.watch.follow("balancer", actor, silent_s=0.4)
    while actor.asked < 2:
        await asyncio.sleep(0.01)
    actor.sign = replace(SIGN, life="another", pid=2)
    await run.happens()
    actor.sign = replace(
        SIGN,
        life="another",
        pid=2,
        records=(
            logging.makeLogRecord(
                {"msg": "1 servers of its pool were lost", "levelno": 30, "name": "sandbox.worker_groups"}
            ),
        ),
    )
    await run.happens()
    assert run.shown[:2] == [
        "balancer died: process 1 is gone, and process 2 in its place", "balancer: 1 servers of its pool were lost"
    ]  # fmt: skip
    assert not run.ended


async def test_a_run_in_which_nothing_gets_on_ends_naming_its_oldest_wait(logged: Logged):
    run = Run(logged, replace(CONFIG, still_s=0.6))

    async def wait_for_ever() -> None:
        await within(asyncio.Event().wait(), 100, waiter="train loop", owner="generation", reason="3 rollouts")

    with pytest.raises(RStarError, match=r"no progress, .*train loop has waited 1 s for generation \(3 rollouts\)"):
        await asyncio.wait_for(run.watch.guard(wait_for_ever()), 60)
    assert len(run.shown) == 1 and "train loop has waited 0 s for generation" in run.shown[0]
    await run.watch.close()


def test_a_stopped_process_is_killed_and_none_that_merely_has_its_id(monkeypatch: pytest.MonkeyPatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        began = birth(child.pid)
        child.send_signal(signal.SIGSTOP)
        kill_here(replace(SIGN, pid=child.pid, birth=birth(os.getpid())))
        assert child.poll() is None
        booted_s = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 3_600)  # the clock was set
        kill_here(replace(SIGN, pid=child.pid, birth=began))
        assert child.wait(60) == -signal.SIGKILL
        kill_here(replace(SIGN, pid=child.pid, birth=began))  # gone already
    finally:
        child.kill()
        child.wait()


SPIN = (
    "import os, time\nos.sched_setaffinity(0, {CORE})\nend = time.monotonic() + 60\nwhile time.monotonic() < end: ..."
)


@pytest.mark.long
def test_a_process_that_gets_no_core_is_told_from_one_that_is_stopped():
    """Two that spin on one core each wait half of the time; a stopped one waits for nothing."""
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", SPIN.replace("CORE", str(core))]
    spinning, stopped = (subprocess.Popen(command) for _ in range(2))
    try:
        time.sleep(1.0)
        before = waits_for_cores_s(spinning.pid)
        time.sleep(1.0)
        waited_s = starved_s(before, waits_for_cores_s(spinning.pid))
        assert waited_s > 0.2
        stopped.send_signal(signal.SIGSTOP)
        while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:  # it needs a core to stop
            time.sleep(0.01)
        before = waits_for_cores_s(stopped.pid)
        time.sleep(1.0)
        assert starved_s(before, waits_for_cores_s(stopped.pid)) == 0
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

    gone = Watch(CONFIG, head=Head())  # type: ignore[arg-type]
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
    pid, until_s = int(parent.stdout), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until_s
        time.sleep(0.05)
