"""Estimated lengths of live rollouts, and the KV that they will need.

Legend: H horizons (tokens of growth from now), N rollouts, G prompt groups under one pair of budgets.

Running rollouts grow together, one token per decode step, so "h tokens from now" is the same time for all of them. At
that time a rollout with response a is alive with probability P(h) (`estimate.py`) and holds a + h tokens besides its
prompt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.expected_kv.estimate import Floats, LengthEstimate
from scheduler.expected_kv.learned import LearnedLengths
from scheduler.state import Rollout, State

NUM_HORIZONS = 20
LEARN_EVERY = 128  # observations between two refreshes of the estimate, fewer with few groups

Rows = tuple[Floats, Floats, Floats]
"""[H] each: demand, its variance, and its covariance with one sibling of that age."""


@dataclass(frozen=True, slots=True)
class FreshRows:
    """The demand that a fresh rollout of each group would add to a replica, per horizon, and its maximum."""

    demand_GH: Floats
    variance_GH: Floats
    shared_GH: Floats  # covariance with one sibling there
    peaks_G: list[tuple[float, float, float]]  # maxima of the three over the horizons
    length_G: Floats  # expected response tokens


@dataclass(slots=True, eq=False)
class Budgets:
    """Rollouts under one pair of budgets (response tokens and turns), with a separate estimate."""

    estimate: LengthEstimate
    sampled_tokens: float  # by rollouts that have ended, ...
    response_tokens: float  # ... and tokens of their responses, tools' text included
    live: int = 0  # rollouts that have not ended
    fresh: FreshRows | None = None  # of the groups known at the last refresh

    @property
    def growth(self) -> float:
        """Response tokens per sampled token."""
        return max(1.0, self.response_tokens / self.sampled_tokens)

    def ended(self, sampled_tokens: float, response_tokens: float) -> None:
        self.sampled_tokens += sampled_tokens
        self.response_tokens += response_tokens

    def fresh_of(self, group: "Group") -> FreshRows | None:
        """None: the group is newer than the last refresh."""
        return self.fresh if self.fresh is not None and group.index < len(self.fresh.peaks_G) else None


def rows(size_NH: Floats, alive_NH: Floats, shared_NH: Floats, siblings_N1: Floats | float) -> tuple[Floats, Floats]:
    """Demand and its variance [N, H] of rollouts that hold `size` while they are alive."""
    return size_NH * alive_NH, size_NH * size_NH * (alive_NH * (1.0 - alive_NH) + siblings_N1 * shared_NH)


class Group:
    """One prompt group: its waiting rollouts, how many have started, and on which replicas they are."""

    def __init__(self, budgets: Budgets, index: int, prompt_tokens: int, draw: int = 0) -> None:
        self.budgets = budgets
        self.draw = draw
        self.index = index  # in the estimate
        self.prompt_tokens = prompt_tokens
        self.fresh: OrderedDict[str, Rollout] = OrderedDict()
        self.started = 0
        self.live = 0
        self.residents_at: dict[int, int] = {}  # residents by replica index


class Lengths:
    """All groups with a live rollout, and their estimates."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.groups: dict[str, Group] = {}
        self.horizons_H: Floats = np.zeros(NUM_HORIZONS)
        self._budgets: dict[tuple[int, int], Budgets] = {}
        self._learnt_at = -1
        self._observed = 0  # in this step

    # -- events ---------------------------------------------------------------------------------------------------
    def track(self, rollout: Rollout) -> Group:
        """The rollout's group; adds the rollout and the group if they are new."""
        load = rollout.load
        group = self.groups.get(load.group_id)
        if group is None:
            if not self.groups:  # a step begins: earlier observations must not delay learning in it
                self._observed = 0
                self.stale()
            budgets = self._budgets_of(load.budget, load.max_turns)
            index = budgets.estimate.add_group(load.group_id)
            group = self.groups[load.group_id] = Group(budgets, index, load.prompt_tokens, load.draw)
        if rollout.length_row < 0:
            rollout.length_row = group.budgets.estimate.start(group.index, load.generated_tokens)
            group.live += 1
            group.budgets.live += 1
        return group

    def group_of(self, rollout: Rollout) -> Group:
        return self.groups[rollout.load.group_id]

    def grow(self, rollout: Rollout) -> None:
        self._observed += 1
        self.group_of(rollout).budgets.estimate.grow(rollout.length_row, rollout.load.generated_tokens)

    def leave(self, rollout: Rollout, *, ended: bool, truncated: bool) -> None:
        """The rollout left its replica: it has ended (`ended`), or waits again."""
        self._observed += 1
        if ended:
            budgets, load = self.group_of(rollout).budgets, rollout.load
            budgets.estimate.end(rollout.length_row, load.generated_tokens, truncated=truncated)
            budgets.ended(load.generated_tokens, load.response_tokens)
            self._forget(rollout)

    def withdraw(self, rollout: Rollout) -> None:
        """The rollout was cancelled while it waited, which is not evidence of its length."""
        self.group_of(rollout).budgets.estimate.drop(rollout.length_row)
        self._forget(rollout)

    def add_history(
        self, max_response_tokens: int, max_turns: int, ended: Sequence[tuple[str, float, bool]], *, growth: float
    ) -> None:
        """Add lengths of an earlier step or run: (group, sampled tokens, truncated), with response tokens per token."""
        budgets = self._budgets_of(max_response_tokens, max_turns)
        budgets.estimate.add_history(ended)
        sampled_tokens = sum(sampled for _, sampled, _ in ended)
        budgets.ended(sampled_tokens, growth * sampled_tokens)
        self._renumber()

    def learned(self) -> tuple[LearnedLengths, ...]:
        """The statistics of every pair of budgets."""
        return tuple(
            LearnedLengths(
                max_response_tokens=max_response_tokens,
                max_turns=max_turns,
                sampled_tokens=budgets.sampled_tokens,
                response_tokens=budgets.response_tokens,
                past=budgets.estimate.past(),
            )
            for (max_response_tokens, max_turns), budgets in self._budgets.items()
        )

    def load_learned(self, learned: Sequence[LearnedLengths]) -> None:
        """Replace the statistics of all rollouts that have ended."""
        named = {(one.max_response_tokens, one.max_turns) for one in learned}
        self._budgets = {pair: budgets for pair, budgets in self._budgets.items() if budgets.live or pair in named}
        self._set_horizons()
        for one in learned:
            budgets = self._budgets_of(one.max_response_tokens, one.max_turns)
            budgets.estimate.load_past(one.past)
            budgets.sampled_tokens, budgets.response_tokens = one.sampled_tokens, one.response_tokens
        self._renumber()

    def new_policy_version(self) -> None:
        """The weights changed: known lengths decay, and observations under the old ones do not delay learning."""
        self._observed = 0
        for budgets in self._budgets.values():
            budgets.estimate.forget_finished()
        known = {
            pair: budgets for pair, budgets in self._budgets.items() if budgets.live or budgets.estimate.has_history
        }
        if len(known) < len(self._budgets):
            self._budgets = known
            self._set_horizons()
        self._renumber()

    def stale(self) -> None:
        """Groups or horizons have changed: refresh before the next decision."""
        self._learnt_at = -1

    def _budgets_of(self, max_response_tokens: int, max_turns: int) -> Budgets:
        budgets = self._budgets.get((max_response_tokens, max_turns))
        if budgets is None:
            # One rollout without tool text is the prior: the first that end are short, and may be mostly tool text.
            most, estimate = float(max_response_tokens), LengthEstimate(max_response_tokens)
            budgets = self._budgets[max_response_tokens, max_turns] = Budgets(estimate, most, most)
            if max_response_tokens > self.horizons_H[-1]:
                self._set_horizons()
        return budgets

    def _set_horizons(self) -> None:
        """The horizons reach to the longest budget; near ones, which are more certain, are denser."""
        longest = max((most for most, _ in self._budgets), default=0)
        self.horizons_H = longest * (np.arange(NUM_HORIZONS) / (NUM_HORIZONS - 1)) ** 1.5
        self.stale()

    def _forget(self, rollout: Rollout) -> None:
        group = self.group_of(rollout)
        rollout.length_row = -1
        group.live -= 1
        group.budgets.live -= 1
        if group.live == 0:
            del self.groups[rollout.load.group_id]

    def _renumber(self) -> None:
        """The estimates have dropped finished groups: update the indices of the others."""
        for group_id, group in self.groups.items():
            group.index = group.budgets.estimate.add_group(group_id)
        self.stale()

    def leaks(self) -> list[str]:
        return [f"group {group_id!r} still has {group.live} live" for group_id, group in self.groups.items()]

    # -- learning -------------------------------------------------------------------------------------------------
    def learn(self) -> bool:
        """Refresh the estimates if there are enough observations since the last time; True if it did."""
        patience = max(min(LEARN_EVERY, 4 + len(self.groups) // 4), self._observed // 100)
        if self._learnt_at >= 0 and self._observed < self._learnt_at + patience:
            return False
        self._learnt_at = self._observed
        self._note_survivors()
        for budgets in self._budgets.values():
            if not budgets.live:
                continue
            estimate = budgets.estimate
            estimate.refresh()
            groups_G = np.arange(estimate.num_groups)
            ages_G = np.zeros(estimate.num_groups)
            length_G = estimate.mean_remaining(groups_G, ages_G)
            alive_GH, covariance_GH = estimate.survivals(groups_G, ages_G, self.horizons_H)
            size_GH = self._sizes(budgets, ages_G)
            demand_GH, variance_GH = rows(size_GH, alive_GH, covariance_GH, 0.0)
            shared_GH = covariance_GH * size_GH**2
            peaks_G3 = np.stack([demand_GH.max(axis=1), variance_GH.max(axis=1), shared_GH.max(axis=1)], axis=1)
            peaks_G = [
                (float(demand), float(variance), float(shared)) for demand, variance, shared in peaks_G3.tolist()
            ]
            budgets.fresh = FreshRows(demand_GH, variance_GH, shared_GH, peaks_G, length_G)
        return True

    def _note_survivors(self) -> None:
        """Give the estimates the ages of all residents: counting only ends would bias them."""
        ages: dict[Budgets, tuple[list[int], list[float]]] = {budgets: ([], []) for budgets in self._budgets.values()}
        for replica in self.state.replicas.values():
            for rollout in replica.residents.values():
                rows, known = ages[self.group_of(rollout).budgets]
                rows.append(rollout.length_row)
                known.append(rollout.sampled_at(replica.decode_step))
        for budgets, (rows, known) in ages.items():
            budgets.estimate.survive(np.array(rows, dtype=np.int64), np.array(known))

    # -- queries --------------------------------------------------------------------------------------------------
    def expected_life(self) -> tuple[float, float]:
        """Means over fresh rollouts of all groups: tokens of prompt and response at the end, and sampled tokens; ones
        if there is no group."""
        known = [(group, group.budgets.fresh_of(group)) for group in self.groups.values()]
        lives = [(group.prompt_tokens, fresh.length_G[group.index]) for group, fresh in known if fresh is not None]
        if not lives:
            return 1.0, 1.0
        prompt, sampled = np.mean(lives, axis=0).tolist()
        return prompt + sampled, sampled

    def _sizes(self, budgets: Budgets, response_N: Floats) -> Floats:
        """KV tokens [N, H] besides the prompt while alive; rounding up costs every rollout half a block."""
        grown_NH = response_N[:, None] + budgets.growth * self.horizons_H
        return np.minimum(grown_NH, budgets.estimate.max_response_tokens) + self.state.block_tokens / 2

    def rows_of(self, rollout: Rollout) -> Rows:
        """The demand that this rollout would add to a replica."""
        group, load = self.group_of(rollout), rollout.load
        if load.response_tokens == 0:
            fresh = group.budgets.fresh_of(group)
            if fresh is None:  # already resident when its replica registered, before any learning
                self.stale()
                self.learn()
                fresh = group.budgets.fresh_of(group)
            assert fresh is not None
            return fresh.demand_GH[group.index], fresh.variance_GH[group.index], fresh.shared_GH[group.index]
        age_1 = np.array([float(min(load.generated_tokens, load.max_response_tokens - 1))])
        alive_1H, shared_1H = group.budgets.estimate.survivals(np.array([group.index]), age_1, self.horizons_H)
        size_1H = self._sizes(group.budgets, np.array([float(load.response_tokens)]))
        demand_1H, variance_1H = rows(size_1H, alive_1H, shared_1H, 0.0)
        return demand_1H[0], variance_1H[0], shared_1H[0] * size_1H[0] ** 2

    def peaks_of(self, rollout: Rollout) -> tuple[float, float, float]:
        """The maxima of demand, variance and covariance with a sibling."""
        group = self.group_of(rollout)
        fresh = group.budgets.fresh_of(group)
        if rollout.load.response_tokens == 0 and fresh is not None:
            return fresh.peaks_G[group.index]
        demand_H, variance_H, shared_H = self.rows_of(rollout)
        return float(demand_H.max()), float(variance_H.max()), float(shared_H.max())

    def rows_at(self, rollouts: Sequence[Rollout], decode_step: float, replica_index: int) -> tuple[Floats, Floats]:
        """Demand and variance [N, H] of a replica's residents at their current ages, which the estimates receive."""
        groups = [self.group_of(rollout) for rollout in rollouts]
        age_N = np.array([rollout.sampled_at(decode_step) for rollout in rollouts])
        response_N = np.array([rollout.response_at(decode_step) for rollout in rollouts])
        index_N = np.array([group.index for group in groups])
        row_N = np.array([rollout.length_row for rollout in rollouts])
        siblings_N1 = np.array([[float(group.residents_at[replica_index] - 1)] for group in groups])
        alive_NH, shared_NH, size_NH = np.zeros((3, len(groups), NUM_HORIZONS))
        for budgets in {group.budgets: None for group in groups}:
            of_N = np.array([group.budgets is budgets for group in groups])
            budgets.estimate.survive(row_N[of_N], age_N[of_N])
            alive_NH[of_N], shared_NH[of_N] = budgets.estimate.survivals(index_N[of_N], age_N[of_N], self.horizons_H)
            size_NH[of_N] = self._sizes(budgets, response_N[of_N])
        return rows(size_NH, alive_NH, shared_NH, siblings_N1)
