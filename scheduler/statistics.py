"""Statistics of one step: samples of the balancer's snapshot, waiting times, and causes of waiting. No clock."""

from collections.abc import Sequence
from math import inf

from rstar_ray.run_dir.metrics import BalancerStats
from scheduler.records import BalancerSnapshot
from scheduler.state import QueueBlock, Rollout

SAMPLE_EVERY_S = 0.25


class StepStatistics:
    """Accumulates statistics; `take` returns those since its last call."""

    def __init__(self, start: BalancerSnapshot) -> None:
        self.sampled_s = -inf
        self._blocked_s = dict.fromkeys(QueueBlock, 0.0)
        self._block: QueueBlock | None = None
        self._block_since_s = 0.0
        self._reset(start)

    def _reset(self, start: BalancerSnapshot) -> None:
        self._start = start
        self._blocked_at_start_s = dict(self._blocked_s)
        self._samples = 0
        self._most_waiting = self._most_in_flight = 0
        self._used = self._most_used = self._reserved = self._most_reserved = 0.0  # shares of all caches
        self._waits_s: list[float] = []
        self._quarantined: list[str] = []

    def sample(self, now: BalancerSnapshot) -> None:
        """Add a sample; ignored while no rollout is live."""
        capacity = sum(replica.kv_capacity_tokens for replica in now.replicas)
        if not capacity or not now.waiting + now.in_flight:
            return
        used = sum(replica.kv_used_tokens for replica in now.replicas) / capacity
        reserved = sum(replica.kv_reserved_tokens for replica in now.replicas) / capacity
        self._samples += 1
        self._most_waiting = max(self._most_waiting, now.waiting)
        self._most_in_flight = max(self._most_in_flight, now.in_flight)
        self._used += used
        self._most_used = max(self._most_used, used)
        self._reserved += reserved
        self._most_reserved = max(self._most_reserved, reserved)

    def quarantined(self, replica_id: str, reason: str) -> None:
        """Add a replica that restarts because of an impossible report."""
        self._quarantined.append(f"{replica_id}: {reason}")

    def queue_blocked(self, block: QueueBlock | None, now_s: float) -> None:
        """Set what blocks the queue from now on; None if it is empty."""
        self._advance(now_s)
        self._block = block

    def _advance(self, now_s: float) -> None:
        if self._block is not None:
            self._blocked_s[self._block] += now_s - self._block_since_s
        self._block_since_s = now_s

    def wait_begins(self, rollout: Rollout, now_s: float) -> None:
        self._advance(now_s)
        rollout.waiting_since_s, rollout.blocked_before_s = now_s, dict(self._blocked_s)

    def wait_ends(self, rollout: Rollout, now_s: float) -> dict[str, float]:
        """Seconds for which the queue was blocked while this rollout waited, by cause."""
        self._advance(now_s)
        self._waits_s.append(now_s - rollout.waiting_since_s)
        return _grown(self._blocked_s, rollout.blocked_before_s)

    def take(self, now: BalancerSnapshot, leaks: Sequence[str], now_s: float) -> BalancerStats:
        """The statistics of the step that ends now."""
        self._advance(now_s)
        waits, samples, start = sorted(self._waits_s), max(1, self._samples), self._start
        figures = BalancerStats(
            values={
                "balancer/queue_len_max": self._most_waiting,
                "balancer/in_flight_max": self._most_in_flight,
                "balancer/kv_util_mean": self._used / samples,
                "balancer/kv_util_max": self._most_used,
                "balancer/kv_reserved_mean": self._reserved / samples,
                "balancer/kv_reserved_max": self._most_reserved,
                "balancer/num_preemptions": now.preemptions - start.preemptions,
                "balancer/num_moves": now.moves - start.moves,
                "balancer/num_recomputed_tokens": now.recomputed_tokens - start.recomputed_tokens,
                "balancer/wait_p50_s": waits[len(waits) // 2] if waits else 0.0,
                "balancer/wait_p99_s": waits[len(waits) * 99 // 100] if waits else 0.0,
                "balancer/preemption_risk": now.risk,
            },
            rule=now.rule,
            quarantined=tuple(self._quarantined),
            faults=tuple(leaks),
            held_s=_grown(self._blocked_s, self._blocked_at_start_s),
        )
        self._reset(now)
        return figures


def _grown(now: dict[QueueBlock, float], before: dict[QueueBlock, float]) -> dict[str, float]:
    """Seconds added by each cause; values below a millisecond are omitted."""
    grown = {str(block): round(now[block] - before[block], 3) for block in QueueBlock}
    return {block: seconds for block, seconds in grown.items() if seconds}
