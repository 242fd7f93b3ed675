"""Times the work of one replica: what each rollout does and how long it takes."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.generation.spans import Activity, Span

T = TypeVar("T")


class TimelineLog:
    """Seconds are since the epoch, so that the spans of several machines fit together."""

    def __init__(self, replica_id: str, took: Callable[[Span, object], None] = lambda span, result: None) -> None:
        """`took` hears of every span, and what came of it; None where it failed."""
        self._replica_id = replica_id
        self._took = took
        self._at_tools: Counter[str] = Counter()  # calls that each rollout waits for now

    async def noted(self, activity: Activity, rollout_id: str, work: Awaitable[T]) -> T:
        """Do the work; how long it took is noted, however it ends."""
        began_s = time.time()
        self._at_tools[rollout_id] += activity is Activity.TOOL
        result: T | None = None
        try:
            result = await work
            return result
        finally:
            self._at_tools[rollout_id] -= activity is Activity.TOOL
            if not self._at_tools[rollout_id]:
                del self._at_tools[rollout_id]
            self._took(Span(self._replica_id, rollout_id, activity, began_s, time.time()), result)

    def at_tools(self) -> tuple[str, ...]:
        """Rollouts that wait for a tool now, and sample nothing."""
        return tuple(rollout_id for rollout_id, calls in self._at_tools.items() if calls)
