"""Finds replicas with room for a rollout: compares expected demand with the size of the cache.

Legend: H horizons (tokens of growth from now), S replicas by index.

    demand(h) = sum_i (a_i + h) P_i(h)      variance(h) = sum_i (a_i + h)^2 (P_i(h) (1 - P_i(h)) + (m_i - 1) C_i(h))

over the residents i of a replica, where m_i siblings share it and C is the covariance of their survival. A rollout is
admitted if demand + z sqrt(variance) + prompts <= capacity at every h, itself included. Prompts count once per group
and replica.
"""

from math import inf, sqrt

import numpy as np

from scheduler.expected_kv.caution import Caution
from scheduler.expected_kv.demand_profile import Profile
from scheduler.expected_kv.estimate import Floats
from scheduler.expected_kv.lengths import Group, Lengths
from scheduler.state import Replica, Rollout, State

REFRESH_STEPS = 32  # decode steps after which a replica's profile is computed again
CLEAR_ROOM = 0.02  # of a cache: with more room than this no exact test is needed
ROOMIEST = "most room by expected KV"
CACHED = "most room by expected KV, its siblings' prompt being cached there"
LARGE = "most room by expected KV of the replicas that are large enough for it"
PROMPT_WORTH = 2  # a cached prompt saves its KV and its prefill


class Room:
    """The profiles of all replicas, and the demand of each at its worst horizon."""

    def __init__(self, state: State, lengths: Lengths, caution: Caution) -> None:
        self.state = state
        self._lengths = lengths
        self._caution = caution
        self._profiles: dict[str, Profile] = {}
        self._peak_S: Floats = np.zeros(0)  # expected demand at the worst horizon; inf: closed
        self._variance_S: Floats = np.zeros(0)  # at that horizon
        self._capacity_S: Floats = np.zeros(0)
        self.why = ""  # reason of the last choice of `place`
        self._exact_S: list[bool] = []  # measured; False: estimated from a measurement and later admissions

    # -- choosing a replica ---------------------------------------------------------------------------------------
    def place(self, rollout: Rollout, turn: int) -> Replica | None:
        """The replica with the most room after admission; a cached prompt counts as room; ties rotate with `turn`."""
        group = self._lengths.group_of(rollout)
        needed = rollout.load.least_tokens
        preferred = self.state.replicas.get(rollout.prefer) if rollout.prefer is not None else None
        if preferred is not None and preferred.open and preferred.has_seat and preferred.kv_capacity_tokens >= needed:
            self.why = rollout.why
            return preferred  # the move's decision has checked its need
        peaks = self._lengths.peaks_of(rollout)
        while True:
            best, room = self._roomiest(group, peaks, turn)
            if best < 0:
                if self._measure_loose():
                    continue
                return None
            replica = self.state.by_index[best]
            assert replica is not None
            self.why = CACHED if best in group.residents_at else ROOMIEST
            if replica.kv_capacity_tokens < needed:
                self.why = LARGE
                return self._place_among_large(rollout, needed)
            if room >= CLEAR_ROOM * replica.kv_capacity_tokens:
                return replica
            if not self._exact_S[best]:
                self.measure(replica)
            elif self.fits(replica, rollout):
                return replica
            elif not self._measure_loose():
                return None

    def _place_among_large(self, rollout: Rollout, needed: int) -> Replica | None:
        """As `place`, if the replica with the most room can never hold it: chooses among those that can."""
        self._measure_loose()
        large = [r for r in self.state.open() if r.has_seat and r.kv_capacity_tokens >= needed]
        best = max(large, key=lambda r: (not r.residents, r.kv_capacity_tokens - self._peak_S[r.index]), default=None)
        return best if best is not None and self.fits(best, rollout) else None

    def _roomiest(self, group: Group, peaks: tuple[float, float, float], turn: int) -> tuple[int, float]:
        """The index of the open replica with the most room after an admission, and that room; -1 if none is open.

        Siblings there save a prompt, which counts as room, but are long if the newcomer is, which takes room.
        Between two measurements, peaks and variances are summed as if all occurred at the worst horizon.
        """
        if len(self._peak_S) == 0:
            return -1, -inf
        demand, variance, shared = peaks
        prompt, z = self.state.whole_blocks(group.prompt_tokens), self._caution.z
        room_S = self._capacity_S - self._peak_S - (demand + prompt) - z * np.sqrt(self._variance_S + variance)
        for index, siblings in group.residents_at.items():
            alone = self._variance_S[index] + variance
            room_S[index] += PROMPT_WORTH * prompt - z * (sqrt(alone + 2.0 * siblings * shared) - sqrt(alone))
        first = turn % len(room_S)  # ties rotate
        best = (int(np.concatenate([room_S[first:], room_S[:first]]).argmax()) + first) % len(room_S)
        if room_S[best] == -inf:
            return -1, -inf
        prefill_saved = (PROMPT_WORTH - 1) * prompt if best in group.residents_at else 0  # worth as much, but not room
        return best, float(room_S[best]) - prefill_saved

    def fits(self, replica: Replica, rollout: Rollout) -> bool:
        """Exact test with the replica's profile; an empty replica takes any rollout that its cache can hold."""
        if not replica.has_seat or replica.kv_capacity_tokens < rollout.load.least_tokens:
            return False
        return not replica.residents or self.peak(replica, self._caution.z, rollout) <= replica.kv_capacity_tokens

    def peak(
        self,
        replica: Replica,
        z: float,
        newcomer: Rollout | None = None,
        *,
        staying: bool = False,
        within_tokens: float = inf,
    ) -> float:
        """The most KV that its residents, rollouts that move there, and a newcomer are likely to need from now on.

        `staying`: without those that were asked to leave, which may also end before their turn does;
        `within_tokens`: until all have grown by this many tokens.
        """
        profile = self._profiles[replica.replica_id]
        if newcomer is None:
            return profile.peak(z, staying=staying, within_tokens=within_tokens)
        profile.settle()
        group, (demand_H, variance_H, shared_H) = self._lengths.group_of(newcomer), self._lengths.rows_of(newcomer)
        if siblings := group.residents_at.get(replica.index, 0):
            return profile.peak(z, demand_H, variance_H + 2.0 * siblings * shared_H)
        return profile.peak(z, demand_H, variance_H) + replica.whole_blocks(group.prompt_tokens)

    def reserved_tokens(self, replica: Replica) -> int:
        """The most that its residents need, at the current risk."""
        return int(self.peak(replica, self._caution.z)) if replica.residents else 0

    def leaks(self) -> list[str]:
        return [text for profile in self._profiles.values() for text in profile.leaks()]

    # -- events ---------------------------------------------------------------------------------------------------
    def admitted(self, rollout: Rollout, replica: Replica) -> None:
        group, index = self._lengths.track(rollout), replica.index
        siblings = self._profiles[replica.replica_id].append(rollout, group)
        self._exact_S[index] = not replica.has_seat
        if not replica.has_seat:
            self._peak_S[index] = inf
        elif group.budgets.fresh_of(group) is not None:
            demand, variance, shared = self._lengths.peaks_of(rollout)
            self._peak_S[index] += demand + (0 if siblings else replica.whole_blocks(group.prompt_tokens))
            self._variance_S[index] += variance + 2.0 * siblings * shared
        else:  # already resident before it could be ranked: closed until measured
            self._peak_S[index] = inf

    def released(self, rollout: Rollout, replica: Replica) -> None:
        self._profiles[replica.replica_id].pop(rollout, self._lengths.group_of(rollout))

    def asked_to_leave(self, rollout: Rollout, source: Replica, target: str | None) -> None:
        """The rollout leaves to move to `target`, where this reserves room, or (None) to wait."""
        self._profiles[source.replica_id].asked_to_leave(rollout)
        if target is not None:
            self._profiles[target].expect(rollout)
            self.measure(self.state.replicas[target])

    def expect_no_longer(self, rollout: Rollout, replica_id: str) -> None:
        """The rollout has arrived, or will not come."""
        if (profile := self._profiles.get(replica_id)) is not None:
            profile.expect_no_longer(rollout)
            self.measure(profile.replica)

    def reported(self, replica: Replica, *, some_wait: bool) -> None:
        self._profiles[replica.replica_id].refresh_after(REFRESH_STEPS if some_wait else 4 * REFRESH_STEPS)
        self.measure(replica)

    def measure(self, replica: Replica) -> None:
        """Compute exactly how much this replica's residents will need."""
        index = replica.index
        self._exact_S[index] = True
        self._capacity_S[index] = replica.kv_capacity_tokens
        self._peak_S[index], self._variance_S[index] = inf, 0.0
        if replica.open and replica.has_seat:
            profile = self._profiles[replica.replica_id]
            demand_H, variance_H = profile.ahead()
            worst = int((demand_H + self._caution.z * np.sqrt(variance_H)).argmax())
            self._peak_S[index] = demand_H[worst] + profile.beside_tokens
            self._variance_S[index] = variance_H[worst]

    def _measure_loose(self) -> bool:
        """Measure the replicas that are not exact; False if there are none."""
        loose = [r for r in self.state.by_index if r is not None and not self._exact_S[r.index]]
        for replica in loose:
            self.measure(replica)
        return bool(loose)

    def replicas_changed(self) -> None:
        missing = len(self.state.by_index) - len(self._exact_S)
        self._peak_S = np.concatenate([self._peak_S, np.full(missing, inf)])
        self._variance_S = np.concatenate([self._variance_S, np.zeros(missing)])
        self._capacity_S = np.concatenate([self._capacity_S, np.zeros(missing)])
        self._exact_S += [True] * missing
        for replica_id in self._profiles.keys() - self.state.replicas.keys():
            del self._profiles[replica_id]
        for index, replica in enumerate(self.state.by_index):
            if replica is None:
                self._peak_S[index], self._exact_S[index] = inf, True
                continue
            if replica.replica_id not in self._profiles:
                self._profiles[replica.replica_id] = Profile(replica, self._lengths)
            self.measure(replica)
