"""The order of admission: the lowest draw, and in it interrupted rollouts, probes of every group, the longest-expected;
sometimes the oldest."""

import heapq
from collections import OrderedDict, deque

import numpy as np

from scheduler.expected_kv.estimate import Floats
from scheduler.expected_kv.lengths import NUM_HORIZONS, Group, Lengths
from scheduler.state import Rollout

PROBES = 4  # siblings of each group that start before groups are ranked by length
OLDEST_EVERY = 32  # every so many admissions the longest-waiting rollout goes first


class AdmissionOrder:
    """All waiting rollouts."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._ranked: list[tuple[int, int, float, int, Group]] = []  # heap: draw, probes done, minus length, tie
        self._resumed: OrderedDict[str, Rollout] = OrderedDict()  # by draw
        self._arrivals: deque[Rollout] = deque()  # fresh ones, oldest first; those that have started are skipped
        self.taken = 0

    def __bool__(self) -> bool:
        return bool(self._ranked or self._resumed)

    def add(self, rollout: Rollout) -> None:
        group, load = self._lengths.track(rollout), rollout.load
        if load.context_tokens == load.prompt_tokens and rollout.prefer is None:
            group.fresh[load.rollout_id] = rollout
            self._arrivals.append(rollout)
        else:
            behind = next(reversed(self._resumed.values()), None)
            self._resumed[load.rollout_id] = rollout
            if behind is not None and behind.load.draw > load.draw:
                for other in sorted(self._resumed.values(), key=lambda waiting: waiting.load.draw):
                    self._resumed.move_to_end(other.load.rollout_id)

    def remove(self, rollout: Rollout) -> None:
        """It waits no longer: it runs on a replica, or was cancelled."""
        self._resumed.pop(rollout.load.rollout_id, None)
        group = self._lengths.group_of(rollout)
        if group.fresh.pop(rollout.load.rollout_id, None) is not None:
            group.started += 1

    def leaks(self) -> list[str]:
        return [f"{len(self._resumed)} interrupted rollouts still queued"] if self._resumed else []

    def rank(self) -> None:
        """Sort groups by their expected length."""
        self._ranked = [
            (group.draw, min(group.started, PROBES), -self._expected(group), tie, group)
            for tie, group in enumerate(self._lengths.groups.values())
            if group.fresh
        ]
        heapq.heapify(self._ranked)

    def _expected(self, group: Group) -> float:
        fresh = group.budgets.fresh_of(group)
        assert fresh is not None
        return float(fresh.length_G[group.index])

    def demand(self) -> Floats:
        """KV [H] that all waiting rollouts are expected to need if they started now, each group's prompt once."""
        demand_H = np.zeros(NUM_HORIZONS)
        for rollout in self._resumed.values():
            demand_H += self._lengths.rows_of(rollout)[0] + self._lengths.group_of(rollout).prompt_tokens
        for group in self._lengths.groups.values():
            if group.fresh and (fresh := group.budgets.fresh_of(group)) is not None:
                demand_H += group.prompt_tokens + len(group.fresh) * fresh.demand_GH[group.index]
        return demand_H

    def next(self) -> Rollout | None:
        while self._ranked and not self._ranked[0][-1].fresh:
            heapq.heappop(self._ranked)
        draw = self._ranked[0][0] if self._ranked else None
        resumed = next(iter(self._resumed.values()), None)
        if resumed is not None and (draw is None or resumed.load.draw <= draw):
            return resumed
        if self.taken % OLDEST_EVERY == OLDEST_EVERY - 1 and (oldest := self._oldest()) and oldest.load.draw == draw:
            return oldest
        return next(iter(self._ranked[0][-1].fresh.values())) if self._ranked else None

    def _oldest(self) -> Rollout | None:
        while self._arrivals:
            rollout = self._arrivals[0]
            if rollout.replica is None and rollout.length_row >= 0:
                return rollout
            self._arrivals.popleft()
        return None

    def take(self, rollout: Rollout) -> None:
        """It starts now."""
        self.taken += 1
        if self._resumed.pop(rollout.load.rollout_id, None) is not None:
            return
        group = self._lengths.group_of(rollout)
        del group.fresh[rollout.load.rollout_id]
        group.started += 1
        if self._ranked and self._ranked[0][-1] is group:
            draw, _, length, tie, _ = heapq.heappop(self._ranked)
            if group.fresh:
                heapq.heappush(self._ranked, (draw, min(group.started, PROBES), length, tie, group))
