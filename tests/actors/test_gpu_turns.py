"""No engine starts on a shared GPU while the learner changes what it holds there, nor the other way round."""

import asyncio

import pytest

from actors.cluster.gpu_lock import GpuTurns
from rstar_ray.errors import DeadlineExceeded


class Observed:
    """What happened, in order."""

    def __init__(self, turns: GpuTurns) -> None:
        self.turns = turns
        self.events: list[str] = []

    async def engine(self, name: str, until: asyncio.Event) -> None:
        async with self.turns.engine():
            self.events.append(f"{name} starts")
            await until.wait()
            self.events.append(f"{name} is up")

    async def update(self, until: asyncio.Event) -> None:
        async with self.turns.learner():
            self.events.append("update")
            await until.wait()
            self.events.append("updated")


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_engine_that_comes_back_waits_for_the_update_and_the_next_update_for_the_engine():
    observed = Observed(GpuTurns(start_deadline_s=5, step_deadline_s=5))
    updated, up, again = asyncio.Event(), asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(observed.update(updated))
    await settled()
    engines = [asyncio.create_task(observed.engine(name, up)) for name in ("one", "two")]
    await settled()
    assert observed.events == ["update"]
    updated.set()
    await first
    await settled()
    assert observed.events == ["update", "updated", "one starts", "two starts"]  # beside each other
    second = asyncio.create_task(observed.update(again))
    await settled()
    assert observed.events[4:] == []
    up.set()
    again.set()
    await asyncio.gather(*engines, second)
    assert observed.events[4:] == ["one is up", "two is up", "update", "updated"]


async def test_an_engine_that_fails_to_start_gives_its_turn_back():
    turns = GpuTurns(start_deadline_s=5, step_deadline_s=5)
    with pytest.raises(RuntimeError):
        async with turns.engine():
            raise RuntimeError("out of memory")
    async with asyncio.timeout(60), turns.learner():
        pass


async def test_neither_is_waited_for_for_ever():
    turns = GpuTurns(start_deadline_s=0.01, step_deadline_s=0.02)
    async with turns.learner():
        with pytest.raises(DeadlineExceeded, match=r"engine waited 0\.02 s for learner \(its update to end"):
            async with turns.engine():
                pass
    async with turns.engine():
        with pytest.raises(DeadlineExceeded, match=r"learner waited 0\.01 s for engines \(their start"):
            async with turns.learner():
                pass


@pytest.mark.parametrize("moments", range(10))
async def test_of_one_that_waited_and_one_that_comes_just_then_one_has_its_turn_first(moments: int):
    observed = Observed(GpuTurns(start_deadline_s=5, step_deadline_s=5))
    up, updated = asyncio.Event(), asyncio.Event()
    async with observed.turns.learner():
        engine = asyncio.create_task(observed.engine("one", up))
        await settled()
    for _ in range(moments):
        await asyncio.sleep(0)
    update = asyncio.create_task(observed.update(updated))
    await settled()
    assert len(observed.events) == 1
    up.set()
    updated.set()
    await asyncio.gather(engine, update)
    starts, updates = ["one starts", "one is up"], ["update", "updated"]
    assert observed.events in (starts + updates, updates + starts)
