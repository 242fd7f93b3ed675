"""How long will a rollout get? Learned online, from finished and from running rollouts alike.

Legend: B bins of response length, R rollouts seen, G prompt groups, H horizons, all lengths in response tokens
(everything after the prompt).

Counting only finished rollouts would be wrong early in a step, when only the short ones have ended. So the estimate
is a hazard per bin of length, deaths over rollouts at risk (Kaplan and Meier 1958), to which a rollout still running
contributes what it has survived. A rollout cut by its budget counts as survived: the budget is known anyway.

Siblings of a prompt are alike. Each group has a frailty, a factor on the hazard, Gamma-distributed around 1 with shape
`k` (Clayton 1978): after `d` deaths and a survived cumulative hazard of `e` in the group, it is Gamma(k + d, k + e),
and the chance to survive a further hazard `x` is ((k + e) / (k + e + x)) ** (k + d). Closed forms, nothing sampled.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_BINS = 48
PRIOR_ROLLOUTS = 4.0  # weight of the prior in every bin: the hazard over all bins so far
PRIOR_MEAN = 0.75  # of the budget: the mean length assumed before anything has ended, with the weight of one rollout
FRAILTY_SHAPES: Floats = np.array([2.0, 4.0, 8.0, 32.0])  # none below 2: it would read too much into a few early ends


class LengthEstimate:
    """The distribution of response length of one stage (one budget of tokens and turns)."""

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
        self._ended_R: NDArray[np.bool_] = np.zeros(64, dtype=bool)  # by the policy's own choice
        self._size = 0
        self.observations = 0  # since the start; callers refresh when it has moved on enough
        self.shape = 2.0  # of the groups' frailty; small: siblings are much alike
        self._fit_at = 64.0  # deaths seen when the shape is fitted next
        self.hazard_B1: Floats = np.zeros(NUM_BINS + 1)  # cumulative, at the edges
        self.deaths_G: Floats = np.zeros(0)
        self.survived_G: Floats = np.zeros(0)
        self.refresh()

    # -- what happens ---------------------------------------------------------------------------------------------
    def add_group(self, group_id: str) -> int:
        """The group's index, new or known; good until `forget_finished`."""
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = len(self._members)
            self._members.append(0)
        return group

    def start(self, group: int, age: float) -> int:
        """A rollout of this group exists with `age` response tokens; returns its slot."""
        self._members[group] += 1
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._size
            self._size += 1
            if self._size > len(self._age_R):
                grown = len(self._age_R)
                self._age_R = np.concatenate([self._age_R, np.zeros(grown)])
                self._group_R = np.concatenate([self._group_R, np.full(grown, -1)])
                self._ended_R = np.concatenate([self._ended_R, np.zeros(grown, dtype=bool)])
        self._age_R[slot] = age
        self._group_R[slot] = group
        self._ended_R[slot] = False
        return slot

    def grow(self, slot: int, age: float) -> None:
        self._age_R[slot] = age
        self.observations += 1

    def survive(self, slot_N: NDArray[np.int64], age_N: Floats) -> None:
        """These have come this far, and live."""
        self._age_R[slot_N] = age_N

    def end(self, slot: int, age: float, *, truncated: bool) -> None:
        """The rollout ended at `age`; it stays as evidence until its group is forgotten."""
        self._age_R[slot] = age
        self._ended_R[slot] = not truncated
        self._members[int(self._group_R[slot])] -= 1
        self.observations += 1

    def drop(self, slot: int) -> None:
        """The rollout was cancelled: it is no evidence of anything."""
        self._members[int(self._group_R[slot])] -= 1
        self._group_R[slot] = -1
        self._free.append(slot)

    def remember(self, ended: Sequence[tuple[str, float, bool]]) -> None:
        """Lengths from before: (group, response tokens, truncated), of an earlier step or run."""
        for group_id, age, truncated in ended:
            self.end(self.start(self.add_group(f"past/{group_id}"), 0.0), age, truncated=truncated)
        self.refresh()
        self.forget_finished(keep=1.0)

    def forget_finished(self, keep: float = 0.5) -> None:
        """A new policy version: fold groups without a live rollout into the past, which counts `keep` from now on."""
        done = np.array([count == 0 for count in self._members], dtype=bool)
        group_R = self._group_R[: self._size]
        gone_R = (group_R >= 0) & done[group_R] if len(done) else np.zeros(self._size, dtype=bool)
        deaths_B, tokens_B = self._evidence(gone_R)
        self._past_deaths_B = keep * (self._past_deaths_B + deaths_B)
        self._past_tokens_B = keep * (self._past_tokens_B + tokens_B)
        names = [name for name, group in self._groups.items() if not done[group]]
        renumbered = np.full(len(self._members) + 1, -1)
        renumbered[[self._groups[name] for name in names]] = np.arange(len(names))
        self._members = [self._members[self._groups[name]] for name in names]
        self._groups = {name: index for index, name in enumerate(names)}
        self._group_R[: self._size] = np.where(group_R >= 0, renumbered[group_R], -1)
        self._free = [int(slot) for slot in np.flatnonzero(self._group_R[: self._size] < 0)]
        self.refresh()

    # -- what is learned ------------------------------------------------------------------------------------------
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
        """Learn anew from all that is known: about a millisecond for 16,384 rollouts."""
        known_R = self._group_R[: self._size] >= 0
        group_R = self._group_R[: self._size][known_R]
        age_R = self._age_R[: self._size][known_R]
        ended_R = self._ended_R[: self._size][known_R]
        deaths_B, tokens_B = self._evidence(known_R)
        prior_tokens_B = PRIOR_ROLLOUTS * self._widths_B
        seen_deaths = 1.0 + float(deaths_B.sum() + self._past_deaths_B.sum())
        seen_tokens = PRIOR_MEAN * self.max_response_tokens + float(tokens_B.sum() + self._past_tokens_B.sum())
        prior_deaths_B = prior_tokens_B * seen_deaths / seen_tokens
        rate_B = (deaths_B + self._past_deaths_B + prior_deaths_B) / (tokens_B + self._past_tokens_B + prior_tokens_B)
        marginal_B1 = np.concatenate([[0.0], np.cumsum(rate_B * self._widths_B)])
        num_groups = len(self._members)
        self.deaths_G = np.bincount(group_R[ended_R], minlength=num_groups).astype(np.float64)
        marginal_R = np.interp(age_R, self.edges_B1, marginal_B1)
        if self.deaths_G.sum() >= self._fit_at:
            self._fit_at = 1.5 * float(self.deaths_G.sum())
            self.shape = self._likeliest_shape(group_R, marginal_R, ended_R)
        # The population's survival is the mixture over frailties: S = (1 + H / k) ** -k, so H = k (S ** (-1/k) - 1).
        self.hazard_B1 = self.shape * np.expm1(marginal_B1 / self.shape)
        survived_R = np.interp(age_R, self.edges_B1, self.hazard_B1)
        self.survived_G = np.bincount(group_R, weights=survived_R, minlength=num_groups).astype(np.float64)

    def _likeliest_shape(self, group_R: NDArray[np.int64], marginal_R: Floats, ended_R: NDArray[np.bool_]) -> float:
        """The frailty shape under which the groups' lengths are likeliest, on a coarse grid."""
        died_G = self.deaths_G.astype(np.int64)
        scores: list[float] = []
        for k in FRAILTY_SHAPES:
            survived_G = np.bincount(group_R, weights=k * np.expm1(marginal_R / k), minlength=len(died_G))
            rising = np.concatenate([[0.0], np.cumsum(np.log(k + np.arange(int(died_G.max()))))])
            likelihood_G = rising[died_G] + k * np.log(k) - (k + died_G) * np.log(k + survived_G)
            scores.append(float(likelihood_G.sum() + marginal_R[ended_R].sum() / k))
        return float(FRAILTY_SHAPES[int(np.argmax(scores))])

    # -- what is asked --------------------------------------------------------------------------------------------
    @property
    def num_groups(self) -> int:
        return len(self._members)

    def hazard(self, age: Floats) -> Floats:
        """Cumulative hazard at `age`, any shape."""
        return np.interp(age, self.edges_B1, self.hazard_B1)

    def survival(self, group_N: NDArray[np.int64], age_N: Floats, horizon_H: Floats) -> Floats:
        """[N, H]: the chance that a rollout of this group and age is alive `horizon` response tokens later."""
        return self.survivals(group_N, age_N, horizon_H, pairs=False)[0]

    def survivals(
        self, group_N: NDArray[np.int64], age_N: Floats, horizon_H: Floats, *, pairs: bool = True
    ) -> tuple[Floats, Floats]:
        """[N, H] twice: survival, and its covariance between two siblings of this age (they share a frailty)."""
        if len(self.deaths_G) < len(self._members):  # groups that came after the last refresh
            unseen = np.zeros(len(self._members) - len(self.deaths_G))
            self.deaths_G = np.concatenate([self.deaths_G, unseen])
            self.survived_G = np.concatenate([self.survived_G, unseen])
        shape_N1 = (self.shape + self.deaths_G[group_N])[:, None]
        rate_N1 = (self.shape + self.survived_G[group_N])[:, None]
        later_NH = age_N[:, None] + horizon_H[None, :]
        further_NH = np.maximum(self.hazard(later_NH) - self.hazard(age_N)[:, None], 0.0)
        within_NH = later_NH < self.max_response_tokens
        alive_NH = np.where(within_NH, (rate_N1 / (rate_N1 + further_NH)) ** shape_N1, 0.0)
        if not pairs:
            return alive_NH, alive_NH
        both_NH = (rate_N1 / (rate_N1 + 2.0 * further_NH)) ** shape_N1
        return alive_NH, np.where(within_NH, both_NH, 0.0) - alive_NH * alive_NH

    def mean_remaining(self, group_N: NDArray[np.int64], age_N: Floats) -> Floats:
        """[N]: expected response tokens still to come."""
        horizon_B1 = self.edges_B1
        alive_NB = self.survival(group_N, age_N, horizon_B1)
        return ((alive_NB[:, :-1] + alive_NB[:, 1:]) * 0.5 * self._widths_B).sum(axis=1)
