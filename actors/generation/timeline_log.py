"""The latest work of one replica, kept for pictures: what each rollout did and when, and the KV in use meanwhile."""

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from scheduler.picture import Activity, KvSample, Span, Timeline

T = TypeVar("T")

KEPT = 100_000
"""Spans, and samples of the KV: a few steps' worth."""


class TimelineLog:
    """Bounded; seconds since the epoch, so that the logs of several machines fit together."""

    def __init__(self, replica_id: str, took: Callable[[Span, object], None] = lambda span, result: None) -> None:
        """`took` hears of every span, and what came of it; None where it failed."""
        self._replica_id = replica_id
        self._took = took
        self._spans: deque[Span] = deque(maxlen=KEPT)
        self._kv_samples: deque[KvSample] = deque(maxlen=KEPT)
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
            span = Span(self._replica_id, rollout_id, activity, began_s, time.time())
            self._spans.append(span)
            self._took(span, result)

    def at_tools(self) -> tuple[str, ...]:
        """Rollouts that wait for a tool now, and sample nothing."""
        return tuple(rollout_id for rollout_id, calls in self._at_tools.items() if calls)

    def note_kv(self, used_tokens: int) -> None:
        self._kv_samples.append(KvSample(self._replica_id, time.time(), used_tokens))

    def timeline(self, rollouts: str, kv_capacity_tokens: int) -> Timeline:
        """Of the rollouts whose ids begin so, and the KV while they ran."""
        spans = [span for span in self._spans if span.rollout_id.startswith(rollouts)]
        first, last = min((s.start_s for s in spans), default=0.0), max((s.end_s for s in spans), default=0.0)
        samples = [sample for sample in self._kv_samples if first <= sample.at_s <= last]
        return Timeline(spans, samples, kv_capacity_tokens)
