"""An engine's load from vLLM's statistics: KV in use, sequences running and waiting, preemptions."""

from typing import Any

from scheduler.records import ReplicaLoad


class LoadMeter:
    """Fed by vLLM after every step. Preemptions by a swap of weights are not counted."""

    def __init__(self) -> None:
        self.load = ReplicaLoad()  # after the latest step; the engine knows neither its version nor tools
        self.kv_capacity_tokens = 0
        self._recomputed = 0  # preemptions that a swap caused and vLLM has not yet reported

    def forgive_running(self) -> None:
        """A swap puts all running requests back in the queue; the statistics of the last step must have arrived."""
        self._recomputed += self.load.running

    def observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """vLLM's statistics of one step; either may be None."""
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
