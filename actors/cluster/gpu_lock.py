"""A lock for GPUs that engines and learner ranks share: either engines start, or the learner works.

vLLM looks at what is free on its device when it starts, twice, and refuses where another process has released memory
in between, or holds too much for a moment: an update's activations, a model on its way to the device. So no engine
starts during an update, and no update begins while one does. Engines start beside each other.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from rstar_ray.deadline import within

Turn = Callable[[], AbstractAsyncContextManager[None]]

ANYTIME: Turn = nullcontext
"""For GPUs that are not shared."""


@dataclass(slots=True)
class GpuTurns:
    """Turns of two sides; any number of one side at a time. All calls come from one event loop."""

    start_deadline_s: float  # of an engine
    step_deadline_s: float  # of the learner
    _engines: int = 0
    _learning: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def engine(self) -> AsyncGenerator[None]:
        """An engine starts here. Raises `DeadlineExceeded`."""
        await self._wait(lambda: not self._learning, self.step_deadline_s, "engine", "learner", "its update to end")
        self._engines += 1
        try:
            yield
        finally:
            self._engines -= 1
            await self._tell()

    @asynccontextmanager
    async def learner(self) -> AsyncGenerator[None]:
        """The learner loads or updates here. Raises `DeadlineExceeded`."""
        await self._wait(lambda: not self._engines, self.start_deadline_s, "learner", "engines", "their start")
        self._learning += 1
        try:
            yield
        finally:
            self._learning -= 1
            await self._tell()

    async def _wait(self, free: Callable[[], bool], seconds: float, waiter: str, owner: str, reason: str) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(free)

        while not free():  # another caller may have been faster
            await within(wait(), seconds, waiter=waiter, owner=owner, reason=f"{reason}, on a GPU that both have")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
