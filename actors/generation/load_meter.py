"""An engine's load from vLLM's statistics: KV in use, sequences running and waiting, preemptions."""

from typing import Any

from scheduler.records import ReplicaLoad


class LoadMeter:
    """Updated by vLLM after every step. Preemptions due to a swap of weights are not counted."""

    def __init__(self) -> None:
        self.load = ReplicaLoad()  # after the latest step, without policy version and tools
        self.kv_capacity_tokens = 0
        self._recomputed = 0  # preemptions due to a swap that vLLM has not yet reported

    def expect_recompute(self) -> None:
        """A swap preempts all running requests. Call it when the statistics of the last step have arrived."""
        self._recomputed += self.load.running

    def observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Add vLLM's statistics of one step; either may be None."""
        before, stats = self.load, scheduler_stats
        preempted = iteration_stats.num_preempted_reqs if iteration_stats else 0
        by_swap = min(preempted, self._recomputed)
        self._recomputed -= by_swap
        self.load = ReplicaLoad(
            kv_used_tokens=round(stats.kv_cache_usage * self.kv_capacity_tokens) if stats else before.kv_used_tokens,
            running=stats.num_running_reqs if stats else before.running,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs if stats else before.waiting,
            preemptions=before.preemptions + preempted - by_swap,
            steps=before.steps + 1,
        )
