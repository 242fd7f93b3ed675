"""What the balancer has learned, as the driver keeps it: for checkpoints, and for a life of it that began empty."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from actors.balancer import Known
from rstar_ray.run_dir.decoration import decoration
from scheduler.learned import Learned


class BalancerMemory:
    """The newest that was told, and which life of the balancer knows it."""

    def __init__(self, tell: Callable[..., Awaitable[Any]], show: Callable[[str], None]) -> None:
        """`tell`: call a method of the balancer by name, with what it takes and a `reason`."""
        self._tell = tell
        self._show = show
        self._newest: Known | None = None
        self._one_at_a_time = asyncio.Lock()

    async def note(self) -> None:
        """Keep what it knows now, as far as it can be asked. One that began empty meanwhile is taught first."""
        with decoration("what the balancer has learned", self._show):
            await self._known()

    async def learned(self) -> dict[str, Any] | None:
        """For a checkpoint; None where its rule learns nothing."""
        known = await self._known()
        return known.learned.as_json() if known.learned is not None else None

    async def teach(self, saved: Mapping[str, object]) -> None:
        """What a checkpoint had. Raises `ValueError` with the name of what is nonsense in it."""
        learned = Learned.from_json(saved)
        async with self._one_at_a_time:
            self._newest = await self._know_again(learned)

    async def _known(self) -> Known:
        async with self._one_at_a_time:
            before, known = self._newest, await self._tell("learned", reason="what it has learned")
            if before is not None and before.learned is not None and known.epoch != before.epoch:
                known = await self._know_again(before.learned)
            self._newest = known
            return known

    async def _know_again(self, learned: Learned) -> Known:
        return await self._tell("know_again", learned, reason="learning again what was known")
