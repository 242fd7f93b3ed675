"""Expected KV demand of one replica's residents at each horizon, one row per resident.

Legend: H horizons (tokens of growth from now), R residents.
"""

from math import inf

import numpy as np

from scheduler.expected_kv.estimate import Floats
from scheduler.expected_kv.lengths import NUM_HORIZONS, Group, Lengths
from scheduler.state import Replica, Rollout


class Profile:
    """Sums over residents, updated when one arrives or leaves; their ages are those of the last `refresh`."""

    def __init__(self, replica: Replica, lengths: Lengths) -> None:
        self.replica = replica
        self._lengths = lengths
        self._horizons_H = lengths.horizons_H
        self._rollouts: list[Rollout] = []
        self._demand_RH: Floats = np.zeros((8, NUM_HORIZONS))
        self._variance_RH: Floats = np.zeros((8, NUM_HORIZONS))
        self.demand_H: Floats = np.zeros(NUM_HORIZONS)
        self.variance_H: Floats = np.zeros(NUM_HORIZONS)
        self._pending: list[Rollout] = []  # appended, but their rows are not computed yet
        self.prompt_tokens = 0  # of the groups that are here, once each, in whole blocks
        self._fresh_at = 0.0  # decode step of the last full computation
        self._leaving: dict[str, Rollout] = {}  # asked to leave, still here
        self._coming: dict[str, Rollout] = {}  # asked to move here, not yet arrived
        self._coming_H: Floats = np.zeros(NUM_HORIZONS)  # their demand, with their prompts, ...
        self._coming_variance_H: Floats = np.zeros(NUM_HORIZONS)

    def append(self, rollout: Rollout, group: Group) -> int:
        """Add a resident; returns the number of its siblings that were already here."""
        rollout.profile_row = len(self._rollouts)
        self._rollouts.append(rollout)
        self._pending.append(rollout)
        siblings = group.residents_at.get(self.replica.index, 0)
        group.residents_at[self.replica.index] = siblings + 1
        if siblings == 0:
            self.prompt_tokens += self.replica.whole_blocks(group.prompt_tokens)
        return siblings

    def pop(self, rollout: Rollout, group: Group) -> None:
        self.settle()
        self._leaving.pop(rollout.load.rollout_id, None)
        last = self._rollouts.pop()
        row = rollout.profile_row
        self.demand_H -= self._demand_RH[row]
        self.variance_H -= self._variance_RH[row]
        if last is not rollout:
            self._rollouts[row] = last
            last.profile_row = row
            self._demand_RH[row] = self._demand_RH[len(self._rollouts)]
            self._variance_RH[row] = self._variance_RH[len(self._rollouts)]
        rollout.profile_row = -1
        if not self._rollouts:
            self.demand_H = np.zeros_like(self.demand_H)
            self.variance_H = np.zeros_like(self.variance_H)
        group.residents_at[self.replica.index] -= 1
        if group.residents_at[self.replica.index] == 0:
            del group.residents_at[self.replica.index]
            self.prompt_tokens -= self.replica.whole_blocks(group.prompt_tokens)

    def asked_to_leave(self, rollout: Rollout) -> None:
        """Count the resident as leaving: it stays until its turn or the rollout ends."""
        self._leaving[rollout.load.rollout_id] = rollout

    def expect(self, rollout: Rollout) -> None:
        """Reserve room for a rollout that will move here."""
        self._coming[rollout.load.rollout_id] = rollout
        self._count_coming()

    def expect_no_longer(self, rollout: Rollout) -> None:
        """The rollout has arrived, or will not come."""
        if self._coming.pop(rollout.load.rollout_id, None) is not None:
            self._count_coming()

    def _count_coming(self) -> None:
        self._coming_H, self._coming_variance_H = np.zeros(NUM_HORIZONS), np.zeros(NUM_HORIZONS)
        for rollout in self._coming.values():
            demand_H, variance_H, _ = self._lengths.rows_of(rollout)
            self._coming_H += demand_H + self.replica.whole_blocks(rollout.load.prompt_tokens)
            self._coming_variance_H += variance_H

    def ahead(self, *, staying: bool = False) -> tuple[Floats, Floats]:
        """Demand and variance of all residents, or (`staying`) those not asked to leave, and of arriving rollouts."""
        self.settle()
        demand_H, variance_H = self.demand_H + self._coming_H, self.variance_H + self._coming_variance_H
        if staying and self._leaving:
            rows = [rollout.profile_row for rollout in self._leaving.values()]
            demand_H -= self._demand_RH[rows].sum(axis=0)
            variance_H -= self._variance_RH[rows].sum(axis=0)
        return demand_H, np.maximum(variance_H, 0.0)

    def leaks(self) -> list[str]:
        if not (self._rollouts or self.prompt_tokens or self._coming):
            return []
        return [
            f"{self.replica.replica_id} still counts {len(self._rollouts)} rollouts, {self.prompt_tokens} of prompts, "
            f"{len(self._coming)} on their way"
        ]

    def settle(self) -> None:
        """Add the rows of all residents to the sums."""
        if self._horizons_H is not self._lengths.horizons_H:
            self._fill()
            self.refresh()
        elif self._pending:
            self._fill()

    def _fill(self) -> None:
        """Compute the rows of pending rollouts, which are the last ones."""
        if not self._pending:
            return
        rows = [self._lengths.rows_of(rollout) for rollout in self._pending]
        siblings = [self._lengths.group_of(rollout).residents_at[self.replica.index] - 1 for rollout in self._pending]
        first, count = len(self._rollouts) - len(self._pending), len(self._rollouts)
        if count > len(self._demand_RH):
            more = np.zeros((max(count, 2 * len(self._demand_RH)) - len(self._demand_RH), NUM_HORIZONS))
            self._demand_RH = np.concatenate([self._demand_RH, more])
            self._variance_RH = np.concatenate([self._variance_RH, more])
        shared_RH = np.array([row[2] for row in rows])
        demand_RH = np.array([row[0] for row in rows])
        variance_RH = np.array([row[1] for row in rows]) + np.array(siblings)[:, None] * shared_RH
        self._demand_RH[first:count] = demand_RH
        self._variance_RH[first:count] = variance_RH
        self.demand_H += demand_RH.sum(axis=0)
        self.variance_H += variance_RH.sum(axis=0)
        self._pending = []

    def refresh_after(self, steps: int) -> None:
        """Compute all rows again from the residents' current ages if this many decode steps have passed."""
        self.settle()
        if self._rollouts and self.replica.decode_step >= self._fresh_at + steps:
            self.refresh()

    def refresh(self) -> None:
        if self._horizons_H is not self._lengths.horizons_H:
            self._horizons_H = self._lengths.horizons_H
            self._count_coming()
        if not self._rollouts:
            return
        step, count = self.replica.decode_step, len(self._rollouts)
        demand_RH, variance_RH = self._lengths.rows_at(self._rollouts, step, self.replica.index)
        self._demand_RH[:count] = demand_RH
        self._variance_RH[:count] = variance_RH
        self.demand_H = demand_RH.sum(axis=0)
        self.variance_H = variance_RH.sum(axis=0)
        self._fresh_at = step

    @property
    def beside_tokens(self) -> float:
        """Tokens that the rows do not include: prompts, growth since `refresh`, and what the engine reports beyond."""
        growth = len(self._rollouts) * max(0.0, self.replica.decode_step - self._fresh_at)
        unexplained = self.replica.load.kv_used_tokens - (self.demand_H[0] + self.prompt_tokens + growth)
        return self.prompt_tokens + growth + max(0.0, unexplained)

    def peak(
        self,
        z: float,
        demand_H: Floats | float = 0.0,
        variance_H: Floats | float = 0.0,
        *,
        staying: bool = False,
        within_tokens: float = inf,
    ) -> float:
        """The most KV that residents and a newcomer with these rows will need: mean plus `z` deviations.

        `staying`: as in `ahead`; `within_tokens`: until all have grown by this many tokens.
        """
        ahead_H, spread_H = self.ahead(staying=staying)
        need_H = ahead_H + demand_H + z * np.sqrt(np.maximum(spread_H + variance_H, 0.0))
        if within_tokens < self._horizons_H[-1]:
            need_H = np.interp(np.minimum(self._horizons_H, within_tokens), self._horizons_H, need_H)
        return float(need_H.max()) + self.beside_tokens
