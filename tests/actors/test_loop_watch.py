"""The watch on the driver's event loop."""

import asyncio
import threading
import time
from collections.abc import Callable

from actors.health.loop_watch import LoopWatch
from tests.logged import Logged


async def test_a_blocked_loop_is_reported_with_the_call_that_blocks_it(logged: Logged):
    watch = LoopWatch(silent_s=0.2, still_s=600, every_s=0.05)
    watch.start()
    blocks_until(lambda: any("blocked" in line for line in logged))
    await wait_for(lambda: any("continues" in line for line in logged))
    watch.close()
    blocked = next(line for line in logged if "blocked" in line)  # a busy machine may block the loop again
    assert "test_loop_watch.py" in blocked and "(blocks_until)" in blocked


async def test_a_loop_that_stays_blocked_ends_the_process(logged: Logged):
    ended = threading.Event()
    watch = LoopWatch(silent_s=0.1, still_s=0.3, every_s=0.05, end=lambda seconds: ended.set())
    watch.start()
    blocks_until(ended.is_set)
    assert any("it ends, and the same command resumes" in line for line in logged)


async def test_a_loop_that_runs_is_not_reported(logged: Logged):
    watch = LoopWatch(silent_s=30, still_s=60, every_s=0.02)
    watch.start()
    await asyncio.sleep(0.3)
    watch.close()
    assert not any("driver" in line for line in logged)


def blocks_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("not within 30 s")


async def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not within 30 s")
