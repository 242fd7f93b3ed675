"""What the balancer did in one step, from snapshots taken while it went."""

from collections.abc import Mapping, Sequence

from rstar_ray.run_dir.metrics import PlacementFigures
from scheduler.records import BalancerSnapshot


class Tally:
    """Feed it snapshots and waits; `take` gives the figures since the last `take`."""

    def __init__(self, start: BalancerSnapshot) -> None:
        self._start = start
        self._samples = 0
        self._most_waiting = self._most_in_flight = 0
        self._used = self._most_used = self._reserved = self._most_reserved = 0.0  # shares of all caches
        self._waits_s: list[float] = []

    def sample(self, now: BalancerSnapshot) -> None:
        """While nothing waits and nothing is in flight there is nothing to see."""
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

    def waited(self, seconds: float) -> None:
        self._waits_s.append(seconds)

    def take(self, now: BalancerSnapshot, faults: Sequence[str], held_s: Mapping[str, float]) -> PlacementFigures:
        """The figures of the step that ends now; `held_s`: for how long its queue was held up, by what."""
        waits, samples, start = sorted(self._waits_s), max(1, self._samples), self._start
        figures = PlacementFigures(
            rule=now.rule,
            waiting_most=self._most_waiting,
            in_flight_most=self._most_in_flight,
            kv_used_share=self._used / samples,
            kv_used_share_most=self._most_used,
            kv_reserved_share=self._reserved / samples,
            kv_reserved_share_most=self._most_reserved,
            preemptions=now.preemptions - start.preemptions,
            moves=now.moves - start.moves,
            recomputed_tokens=now.recomputed_tokens - start.recomputed_tokens,
            wait_p50_s=waits[len(waits) // 2] if waits else 0.0,
            wait_p99_s=waits[len(waits) * 99 // 100] if waits else 0.0,
            risk=now.risk,
            set_aside=tuple(f"{r.replica_id}: {r.set_aside}" for r in now.replicas if r.set_aside is not None),
            faults=tuple(faults),
            held_s=held_s,
        )
        self.__init__(now)
        return figures
