"""An engine's load from vLLM's statistics: KV in use, sequences decoded and waiting, and want of room."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's state after its latest decode step."""

    kv_used_tokens: int = 0
    running: int = 0  # sequences being decoded
    waiting: int = 0  # requests vLLM holds back for want of room
    preemptions: int = 0  # sequences thrown out of the KV cache for want of room, since the start
    steps: int = 0  # since the start


class LoadMeter:
    """Fed by vLLM after every step. What a swap of weights put back in the queue is not want of room."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        self.kv_capacity_tokens = 0
        self._recomputed = 0  # preemptions that a swap caused and vLLM has not yet reported

    def forgive_running(self) -> None:
        """A swap puts all that runs back in the queue; the statistics of the last step must have come."""
        self._recomputed += self.load.running

    def observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """vLLM's statistics of one step; either may be None."""
        before, stats = self.load, scheduler_stats
        preempted = iteration_stats.num_preempted_reqs if iteration_stats else 0
        by_swap = min(preempted, self._recomputed)
        self._recomputed -= by_swap
        self.load = EngineLoad(
            kv_used_tokens=round(stats.kv_cache_usage * self.kv_capacity_tokens) if stats else before.kv_used_tokens,
            running=stats.num_running_reqs if stats else before.running,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs if stats else before.waiting,
            preemptions=before.preemptions + preempted - by_swap,
            steps=before.steps + 1,
        )
