"""A loop that is held up is seen from another thread, and one that turns is not taken for such a one."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from rstar_ray.tools.pulse import Pulse


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def longest_s(pulse: Pulse, seconds: float) -> float:
    """Of what it says meanwhile."""
    until_s, longest = time.monotonic() + seconds, 0.0
    while time.monotonic() < until_s:
        longest = max(longest, pulse.held_up_s())
        time.sleep(0.005)
    return longest


def test_a_loop_that_waits_and_turns_is_not_held_up(loop: asyncio.AbstractEventLoop):
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), loop)
    assert longest_s(Pulse(loop), 0.2) < 0.15


def test_a_function_that_blocks_it_is_seen_until_it_is_over(loop: asyncio.AbstractEventLoop):
    let = threading.Event()
    loop.call_soon_threadsafe(let.wait)
    pulse = Pulse(loop)
    assert longest_s(pulse, 0.2) > 0.15
    let.set()
    while pulse.held_up_s():
        time.sleep(0.001)
