"""A loop that is held up is seen from another thread, and one that turns is not taken for such a one."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from rstar_ray.tools.host import Pulse


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_loop_that_waits_and_turns_is_not_held_up(loop: asyncio.AbstractEventLoop):
    waiting = asyncio.run_coroutine_threadsafe(asyncio.sleep(60), loop)
    pulse = Pulse(loop)
    for _ in range(3):
        pulse.held_up_s()
        while pulse.held_up_s():  # until the loop has turned, however long this thread and the loop's wait for a core
            time.sleep(0.001)
    assert not waiting.done()
    waiting.cancel()


def test_a_function_that_blocks_it_is_seen_until_it_is_over(loop: asyncio.AbstractEventLoop):
    let = threading.Event()
    loop.call_soon_threadsafe(let.wait)
    pulse = Pulse(loop)
    while pulse.held_up_s() < 0.15:
        time.sleep(0.001)
    let.set()
    while pulse.held_up_s():
        time.sleep(0.001)
