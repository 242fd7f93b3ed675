"""The driver's copy of what the balancer has learned: for checkpoints, and for a balancer that restarted empty."""

import asyncio
from collections.abc import Mapping
from typing import Any

from actors.balancer_service import BalancerService, Known
from actors.remote import Remote
from rstar_ray.run_dir.best_effort import best_effort
from scheduler.expected_kv.learned import Learned


class BalancerMemory:
    """The newest copy, and which incarnation of the balancer has it."""

    def __init__(self, balancer: Remote[BalancerService], deadline_s: float) -> None:
        self._balancer = balancer
        self._deadline_s = deadline_s
        self._newest: Known | None = None
        self._one_at_a_time = asyncio.Lock()

    async def note(self) -> None:
        """Copy what it knows now, if it answers. A balancer that restarted empty gets the earlier copy first."""
        with best_effort("what the balancer has learned"):
            await self._known()

    async def learned(self) -> dict[str, Any] | None:
        """For a checkpoint; None where its rule learns nothing."""
        known = await self._known()
        return known.learned.as_json() if known.learned is not None else None

    async def teach(self, saved: Mapping[str, object]) -> None:
        """What a checkpoint had. Raises `ValueError` with the name of what is nonsense in it."""
        learned = Learned.from_json(saved)
        async with self._one_at_a_time:
            self._newest = await self._load(learned)

    async def _known(self) -> Known:
        async with self._one_at_a_time:
            before = self._newest
            known = await self._balancer.call(
                lambda b: b.learned(), deadline_s=self._deadline_s, reason="what it has learned", retry=True
            )
            if before is not None and before.learned is not None and known.incarnation != before.incarnation:
                known = await self._load(before.learned)
            self._newest = known
            return known

    async def _load(self, learned: Learned) -> Known:
        return await self._balancer.call(
            lambda b: b.load_learned(learned),
            deadline_s=self._deadline_s,
            reason="loading what it had learned",
            retry=True,
        )
