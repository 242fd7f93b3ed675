"""A lock for GPUs that engines and learner ranks share: either engines start or load weights, or the learner works.

vLLM measures the free memory of its device twice during its start, and fails if another process has released memory in
between or holds too much (activations of an update, a model being loaded). So no engine starts during an update, and no
update begins during an engine's start. Several engines may start at once.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from rstar_ray.deadline import within

Turn = Callable[[], AbstractAsyncContextManager[None]]

ANYTIME: Turn = nullcontext
"""No waiting, for GPUs that are not shared."""


@dataclass(slots=True)
class GpuTurns:
    """A lock that several engines or several learner calls may hold, but not both kinds. For one event loop."""

    start_deadline_s: float  # longest start of an engine, or load of weights after it
    step_deadline_s: float  # longest call of the learner
    _engines: int = 0
    _learning: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def engine(self) -> AsyncGenerator[None]:
        """Hold the lock for an engine's start, or its load of weights. Raises `DeadlineExceeded`."""
        await self._wait(lambda: not self._learning, self.step_deadline_s, "engine", "learner", "its update to end")
        self._engines += 1
        try:
            yield
        finally:
            self._engines -= 1
            await self._tell()

    @asynccontextmanager
    async def learner(self) -> AsyncGenerator[None]:
        """Hold the lock for a load or update of the learner. Raises `DeadlineExceeded`."""
        await self._wait(lambda: not self._engines, self.start_deadline_s, "learner", "engines", "their start or load")
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
            await within(wait(), seconds, waiter=waiter, owner=owner, reason=f"{reason}, on a GPU that both use")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
