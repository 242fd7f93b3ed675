"""Estimates rollout lengths, learned online from finished and running rollouts.

Legend: B bins of response length, R rollouts seen, G prompt groups, H horizons, U grid points of a group's common
factor, all lengths in response tokens (everything after the prompt).

Counting only finished rollouts would be biased early in a step, when only short ones have ended. So the estimate is a
hazard per bin of length, deaths over rollouts at risk (Kaplan and Meier 1958), to which a running rollout contributes
the length that it has survived. A rollout cut by its budget counts as survived: the budget is known anyway.

Siblings have similar lengths. The population's survival maps lengths to normal scores, and a sibling's score is
`r u + sqrt(1 - r^2) e` with `u` common to its group and `e` its own, both standard normal: the one-factor Gaussian
copula (Li 2000). It assumes nothing about the population's distribution. A group's `u` has a posterior on a grid, from
ends and from survival; `r^2` is the likeliest of a few values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri

Floats = NDArray[np.float64]

NUM_BINS = 48
FIRST_MEAN = 0.5  # of the budget: the mean length assumed before any rollout has ended
SPARSE_MEAN = 0.75  # the same for bins in which few rollouts of earlier steps have ended
PRIOR_ENDS = 2.0  # weight of the rate assumed for a bin before a step or the run [rollouts that ended in it]
ALIKENESS: Floats = np.array([0.0, 0.05, 0.2, 0.35, 0.5, 0.65, 0.8])  # r^2 that are tried
FIRST_ALIKENESS = 0.35  # until enough rollouts have ended
FIRST_FIT = 64.0  # rollouts that have to end in a step before r^2 is fitted
FACTOR_U: Floats = np.linspace(-2.8, 2.8, 17)
PRIOR_U: Floats = np.exp(-0.5 * FACTOR_U**2) / np.exp(-0.5 * FACTOR_U**2).sum()
LEAST_LOG = -60.0  # a smaller survival counts as this
MOST_COUNTED = 2.0**53  # a float is an exact count up to here; no count is larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The statistics of ended rollouts; an estimate with the same budget can load them."""

    deaths_B: tuple[float, ...]  # decayed, ...
    tokens_B: tuple[float, ...]  # ... and at risk, as the deaths are
    alikeness: float  # r^2
    fit_at: float  # number of deaths at which it is fitted next

    def __post_init__(self) -> None:
        for name, counts in (("deaths_B", self.deaths_B), ("tokens_B", self.tokens_B)):
            if len(counts) != NUM_BINS:
                raise ValueError(f"{name!r} has {len(counts)} bins, not {NUM_BINS}")
            for count in counts:
                if not 0.0 <= count <= MOST_COUNTED:  # refuses NaN as well
                    raise ValueError(f"{name!r} has {count}, not a count")
        if not 0.0 <= self.alikeness < 1.0:
            raise ValueError(f"'alikeness' is {self.alikeness}, not in [0, 1)")
        if not 0.0 < self.fit_at <= MOST_COUNTED:
            raise ValueError(f"'fit_at' is {self.fit_at}, not a positive number of deaths")


def hazard_rates(deaths_B: Floats, tokens_B: Floats, assumed: Floats | float) -> Floats:
    """Ends per token [B]: the mean of a gamma posterior, from ends, tokens at risk and the rate assumed before."""
    return (deaths_B + PRIOR_ENDS) / (tokens_B + PRIOR_ENDS / assumed)


class LengthEstimate:
    """The distribution of response length under one pair of budgets (of tokens and of turns)."""

    def __init__(self, max_response_tokens: int) -> None:
        self.max_response_tokens = max_response_tokens
        self.edges_B1: Floats = max_response_tokens * (np.arange(NUM_BINS + 1) / NUM_BINS) ** 1.5
        self._widths_B: Floats = np.diff(self.edges_B1)
        self._past_deaths_B: Floats = np.zeros(NUM_BINS)  # of rollouts that were forgotten
        self._past_tokens_B: Floats = np.zeros(NUM_BINS)
        self._groups: dict[str, int] = {}
        self._members: list[int] = []  # live rollouts per group index
        self._free: list[int] = []
        self._age_R: Floats = np.zeros(64)
        self._group_R: NDArray[np.int64] = np.full(64, -1)
        self._ended_R: NDArray[np.bool_] = np.zeros(64, dtype=bool)  # by the policy, not cut
        self._size = 0
        self.alikeness = FIRST_ALIKENESS  # r^2; 0: siblings are independent, 1: they have equal scores
        self._fit_at = FIRST_FIT  # number of deaths at which it is fitted next
        self._survival_BU: Floats = np.zeros((NUM_BINS + 1, len(FACTOR_U)))  # log survival at the edges
        self._factor_GU: Floats = np.zeros((0, len(FACTOR_U)))  # posterior of each group's factor
        self.refresh()

    # -- events ---------------------------------------------------------------------------------------------------
    def add_group(self, group_id: str) -> int:
        """The index of a new or known group; valid until `forget_finished`."""
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = len(self._members)
            self._members.append(0)
        return group

    def start(self, group: int, age: float) -> int:
        """A rollout of this group exists with `age` response tokens; returns its row."""
        self._members[group] += 1
        if self._free:
            row = self._free.pop()
        else:
            row = self._size
            self._size += 1
            if self._size > len(self._age_R):
                grown = len(self._age_R)
                self._age_R = np.concatenate([self._age_R, np.zeros(grown)])
                self._group_R = np.concatenate([self._group_R, np.full(grown, -1)])
                self._ended_R = np.concatenate([self._ended_R, np.zeros(grown, dtype=bool)])
        self._age_R[row] = age
        self._group_R[row] = group
        self._ended_R[row] = False
        return row

    def grow(self, row: int, age: float) -> None:
        self._age_R[row] = age

    def survive(self, row_N: NDArray[np.int64], age_N: Floats) -> None:
        """Set the ages of rollouts that continue."""
        self._age_R[row_N] = age_N

    def end(self, row: int, age: float, *, truncated: bool) -> None:
        """The rollout ended at `age`; it stays as evidence until its group is forgotten."""
        self._age_R[row] = age
        self._ended_R[row] = not truncated
        self._members[int(self._group_R[row])] -= 1

    def drop(self, row: int) -> None:
        """The rollout was cancelled: it is not evidence of a length."""
        self._members[int(self._group_R[row])] -= 1
        self._group_R[row] = -1
        self._free.append(row)

    def add_history(self, ended: Sequence[tuple[str, float, bool]]) -> None:
        """Add lengths of an earlier step or run: (group, response tokens, truncated)."""
        for group_id, age, truncated in ended:
            self.end(self.start(self.add_group(f"past/{group_id}"), 0.0), age, truncated=truncated)
        self.refresh()
        self.forget_finished(keep=1.0)

    def forget_finished(self, keep: float = 0.5) -> None:
        """A new policy version: add groups without a live rollout to the past, and multiply its counts by `keep`."""
        deaths_B, tokens_B = self._known_of_ended()
        self._past_deaths_B, self._past_tokens_B = keep * deaths_B, keep * tokens_B
        self._fit_at = FIRST_FIT  # the count starts again too
        names = [name for name, group in self._groups.items() if self._members[group]]
        renumbered = np.full(len(self._members) + 1, -1)
        renumbered[[self._groups[name] for name in names]] = np.arange(len(names))
        self._members = [self._members[self._groups[name]] for name in names]
        self._groups = {name: index for index, name in enumerate(names)}
        group_R = self._group_R[: self._size]
        self._group_R[: self._size] = np.where(group_R >= 0, renumbered[group_R], -1)
        if not names:
            self._size = 0  # assign rows from the first again: sums of floats depend on their order
        self._free = [int(row) for row in np.flatnonzero(self._group_R[: self._size] < 0)]
        self.refresh()

    def past(self) -> Past:
        """The statistics of groups without a live rollout, for another estimate (`load_past`).

        They have not decayed yet: the next policy version decays them, in both estimates.
        """
        deaths_B, tokens_B = self._known_of_ended()
        return Past(
            deaths_B=tuple(deaths_B.tolist()),
            tokens_B=tuple(tokens_B.tolist()),
            alikeness=self.alikeness,
            fit_at=self._fit_at,
        )

    def load_past(self, past: Past) -> None:
        """Replace the statistics of groups without a live rollout."""
        self.forget_finished()
        self._past_deaths_B, self._past_tokens_B = np.array(past.deaths_B), np.array(past.tokens_B)
        self.alikeness, self._fit_at = past.alikeness, past.fit_at
        self.refresh()

    # -- fitting --------------------------------------------------------------------------------------------------
    def _known_of_ended(self) -> tuple[Floats, Floats]:
        """Deaths and tokens at risk per bin: of the past, and of groups without a live rollout."""
        done_G = np.array([count == 0 for count in self._members], dtype=bool)
        group_R = self._group_R[: self._size]
        gone_R = (group_R >= 0) & done_G[group_R] if len(done_G) else np.zeros(self._size, dtype=bool)
        deaths_B, tokens_B = self._evidence(gone_R)
        return self._past_deaths_B + deaths_B, self._past_tokens_B + tokens_B

    def _evidence(self, mask_R: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Deaths and tokens at risk per bin, of the rollouts in the mask."""
        age_R = self._age_R[: self._size][mask_R]
        ended_R = self._ended_R[: self._size][mask_R]
        bin_R = np.clip(np.searchsorted(self.edges_B1, age_R, side="right") - 1, 0, NUM_BINS - 1)
        deaths_B = np.bincount(bin_R[ended_R], minlength=NUM_BINS).astype(np.float64)
        reached_B = np.bincount(bin_R, minlength=NUM_BINS)
        into_R = np.minimum(age_R - self.edges_B1[bin_R], self._widths_B[bin_R])
        partly_B = np.bincount(bin_R, weights=into_R, minlength=NUM_BINS)
        beyond_B = reached_B[::-1].cumsum()[::-1] - reached_B
        return deaths_B, beyond_B * self._widths_B + partly_B

    def refresh(self) -> None:
        """Fit to all observations: about a millisecond for 16,384 rollouts."""
        known_R = self._group_R[: self._size] >= 0
        group_R = self._group_R[: self._size][known_R]
        age_R = self._age_R[: self._size][known_R]
        ended_R = self._ended_R[: self._size][known_R]
        assumed = SPARSE_MEAN if self._past_deaths_B.any() else FIRST_MEAN
        past_B = hazard_rates(self._past_deaths_B, self._past_tokens_B, 1.0 / (assumed * self.max_response_tokens))
        rate_B = hazard_rates(*self._evidence(known_R), past_B)
        marginal_B1 = np.concatenate([[0.0], np.cumsum(rate_B * self._widths_B)])
        seen = (group_R, age_R, self._bins(age_R), ended_R)
        if float(ended_R.sum()) >= self._fit_at:
            self._fit_at = 1.5 * float(ended_R.sum())
            evidence = [self._posterior(marginal_B1, float(alike), *seen)[2] for alike in ALIKENESS]
            self.alikeness = float(ALIKENESS[int(np.argmax(evidence))])
        self._survival_BU, self._factor_GU, _ = self._posterior(marginal_B1, self.alikeness, *seen)

    def _bins(self, age: Floats) -> NDArray[np.int64]:
        return np.clip(np.searchsorted(self.edges_B1, age, side="right") - 1, 0, NUM_BINS - 1)

    def _posterior(
        self,
        marginal_B1: Floats,
        alikeness: float,
        group_R: NDArray[np.int64],
        age_R: Floats,
        bin_R: NDArray[np.int64],
        ended_R: NDArray[np.bool_],
    ) -> tuple[Floats, Floats, float]:
        """Log survival [B + 1, U] given a group's factor, the factors' posterior [G, U], and the log evidence."""
        score_B = ndtri(-np.expm1(-np.clip(marginal_B1[1:], 1e-12, 30.0)))
        own_BU = (score_B[:, None] - np.sqrt(alikeness) * FACTOR_U) / np.sqrt(1.0 - alikeness)
        survival_BU = np.concatenate([np.zeros((1, len(FACTOR_U))), np.maximum(log_ndtr(-own_BU), LEAST_LOG)])
        # An end counts with the probability to end in its bin; a survivor with the probability to reach its age.
        drop_BU = np.maximum(survival_BU[:-1] - survival_BU[1:], 1e-12)
        death_BU = survival_BU[:-1] + np.log(-np.expm1(-drop_BU))
        into_R1 = np.minimum((age_R - self.edges_B1[bin_R]) / self._widths_B[bin_R], 1.0)[:, None]
        alive_RU = survival_BU[bin_R] - into_R1 * drop_BU[bin_R]
        score_RU = np.where(ended_R[:, None], death_BU[bin_R], alive_RU)
        score_GU = np.tile(np.log(PRIOR_U), (len(self._members), 1))
        if len(group_R):
            order = np.argsort(group_R, kind="stable")
            sorted_R = group_R[order]
            first = np.flatnonzero(np.concatenate([[True], sorted_R[1:] != sorted_R[:-1]]))
            score_GU[sorted_R[first]] += np.add.reduceat(score_RU[order], first, axis=0)
        most_G1 = score_GU.max(axis=1, keepdims=True)
        factor_GU = np.exp(score_GU - most_G1)
        total_G1 = factor_GU.sum(axis=1, keepdims=True)
        return survival_BU, factor_GU / total_G1, float((most_G1 + np.log(total_G1)).sum())

    # -- queries --------------------------------------------------------------------------------------------------
    @property
    def has_history(self) -> bool:
        """True if an earlier step is known and has not decayed to less than one rollout."""
        began = self._past_deaths_B.sum() + self._past_tokens_B[-1] / self._widths_B[-1]
        return bool(began >= 1.0)

    @property
    def num_groups(self) -> int:
        return len(self._members)

    def survival(self, group_N: NDArray[np.int64], age_N: Floats, horizon_H: Floats) -> Floats:
        """[N, H]: the probability that a rollout of this group and age is alive `horizon` response tokens later."""
        return self.survivals(group_N, age_N, horizon_H, pairs=False)[0]

    def survivals(
        self, group_N: NDArray[np.int64], age_N: Floats, horizon_H: Floats, *, pairs: bool = True
    ) -> tuple[Floats, Floats]:
        """[N, H] twice: survival, and its covariance between two siblings of this age (they share a factor)."""
        if len(self._factor_GU) < len(self._members):  # groups that are newer than the last refresh
            unseen = np.broadcast_to(PRIOR_U, (len(self._members) - len(self._factor_GU), len(PRIOR_U)))
            self._factor_GU = np.concatenate([self._factor_GU, unseen])
        later_NH = age_N[:, None] + horizon_H[None, :]
        further_NHU = np.exp(self._log_survival(later_NH) - self._log_survival(age_N)[:, None, :])
        factor_NU1 = self._factor_GU[group_N][:, :, None]
        within_NH = later_NH < self.max_response_tokens
        alive_NH = np.where(within_NH, np.minimum((further_NHU @ factor_NU1)[:, :, 0], 1.0), 0.0)
        if not pairs:
            return alive_NH, alive_NH
        both_NH = ((further_NHU * further_NHU) @ factor_NU1)[:, :, 0]
        return alive_NH, np.maximum(np.where(within_NH, both_NH, 0.0) - alive_NH * alive_NH, 0.0)

    def _log_survival(self, age: Floats) -> Floats:
        """[..., U]: log survival from 0 to `age`, for every factor."""
        bins = np.minimum((NUM_BINS * (age / self.max_response_tokens) ** (1 / 1.5)).astype(np.int64), NUM_BINS - 1)
        into = np.clip((age - self.edges_B1[bins]) / self._widths_B[bins], 0.0, 1.0)[..., None]
        return self._survival_BU[bins] * (1.0 - into) + self._survival_BU[bins + 1] * into

    def mean_remaining(self, group_N: NDArray[np.int64], age_N: Floats) -> Floats:
        """[N]: expected response tokens still to come."""
        horizon_B1 = self.edges_B1
        alive_NB = self.survival(group_N, age_N, horizon_B1)
        return ((alive_NB[:, :-1] + alive_NB[:, 1:]) * 0.5 * self._widths_B).sum(axis=1)
