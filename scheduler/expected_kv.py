"""Our rule: admit while the residents' KV demand, now and later, stays below capacity at a given risk.

Legend: H horizons (tokens of growth from now), R residents of one replica, G prompt groups under one pair of budgets,
S places in the fleet.

Running rollouts grow in lock-step, one token per decode step, so "h tokens from now" is one moment for all of them. At
it, resident i with response a_i is alive with probability P_i(h) (scheduler/estimate.py) and then holds a_i + h tokens
beside its prompt:

    demand(h) = sum_i (a_i + h) P_i(h)      variance(h) = sum_i (a_i + h)^2 (P_i(h) (1 - P_i(h)) + (m_i - 1) C_i(h))

where m_i siblings share the replica and C is the covariance of their survival. A rollout is admitted where
demand + z sqrt(variance) + prompts <= capacity at every h, itself included. Prompts count once per group and replica.
`z` starts at the normal quantile of the risk (over `LOOKS`); a report of preemptions raises it, and each rollout that
ends lets it sink back a little, so that while more than `risk` of them are preempted it stays up.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist

import numpy as np

from scheduler.estimate import Floats, LengthEstimate
from scheduler.fleet import BLOCK_TOKENS, Fleet, Replica, Rollout
from scheduler.load import Move, RolloutLoad

NUM_HORIZONS = 20
PROBES = 4  # siblings of each group that start before groups are ranked by length
OLDEST_EVERY = 32  # every so many admissions the longest-waiting rollout goes first
LEARN_EVERY = 128  # observations between two refreshes of the estimate, fewer with few groups
REFRESH_STEPS = 32  # decode steps after which a replica's profile is computed anew
LOOKS = 8  # independent moments during a rollout's life at which its replica may overflow; each gets its share of risk
Z_STEP = 0.1  # how far a report of preemptions moves the safety factor, and `risk` of it back with every end
Z_SPAN = 1.5  # how far it may go above the normal quantile
CLEAR_ROOM = 0.02  # of a cache: more room than this needs no exact test
PROMPT_WORTH = 2  # a cached prompt saves its KV, and its prefill
MOVE_SHARE = 0.003  # tokens computed again because of moves, at most, of all generated
PRESSED_SHARE = 0.008  # the same, where the alternative is an engine's preemption, which wastes more
PRESSED_Z = 0.5  # a replica is pressed when its demand exceeds its cache with this margin
MOVE_GAIN = 4.0  # a token decoded costs at least this many tokens prefilled


class Profile:
    """Expected KV demand of one replica's residents over the horizons, a row per resident."""

    def __init__(self, num_horizons: int) -> None:
        self.rollouts: list[Rollout] = []
        self.demand_RH: Floats = np.zeros((8, num_horizons))
        self.variance_RH: Floats = np.zeros((8, num_horizons))
        self.demand_H: Floats = np.zeros(num_horizons)
        self.variance_H: Floats = np.zeros(num_horizons)
        self.pending: list[Rollout] = []  # appended, but their rows are not computed yet
        self.prompt_tokens = 0  # of the groups present, once each
        self.fresh_at = 0.0  # decode step of the last full computation

    def append(self, rollout: Rollout) -> None:
        rollout.profile_row = len(self.rollouts)
        self.rollouts.append(rollout)
        self.pending.append(rollout)

    def fill(self, demand_RH: Floats, variance_RH: Floats) -> None:
        """The pending rollouts' rows, which are the last ones."""
        first, count = len(self.rollouts) - len(self.pending), len(self.rollouts)
        if count > len(self.demand_RH):
            more = np.zeros((max(count, 2 * len(self.demand_RH)) - len(self.demand_RH), self.demand_RH.shape[1]))
            self.demand_RH = np.concatenate([self.demand_RH, more])
            self.variance_RH = np.concatenate([self.variance_RH, more])
        self.demand_RH[first:count] = demand_RH
        self.variance_RH[first:count] = variance_RH
        self.demand_H += demand_RH.sum(axis=0)
        self.variance_H += variance_RH.sum(axis=0)
        self.pending = []

    def pop(self, rollout: Rollout) -> None:
        assert not self.pending
        last = self.rollouts.pop()
        row = rollout.profile_row
        self.demand_H -= self.demand_RH[row]
        self.variance_H -= self.variance_RH[row]
        if last is not rollout:
            self.rollouts[row] = last
            last.profile_row = row
            self.demand_RH[row] = self.demand_RH[len(self.rollouts)]
            self.variance_RH[row] = self.variance_RH[len(self.rollouts)]
        rollout.profile_row = -1
        if not self.rollouts:
            self.demand_H = np.zeros_like(self.demand_H)
            self.variance_H = np.zeros_like(self.variance_H)

    def replace(self, demand_RH: Floats, variance_RH: Floats) -> None:
        count = len(self.rollouts)
        assert not self.pending
        self.demand_RH[:count] = demand_RH
        self.variance_RH[:count] = variance_RH
        self.demand_H = demand_RH.sum(axis=0)
        self.variance_H = variance_RH.sum(axis=0)


@dataclass(slots=True)
class FreshRows:
    """What a fresh rollout of each group would add to a replica, at every horizon and at most."""

    demand_GH: Floats
    variance_GH: Floats
    shared_GH: Floats  # covariance with one sibling there
    peaks_G: list[tuple[float, float, float]]  # of the three, over the horizons


class Group:
    """One prompt group: who waits, how many siblings have started and where they are."""

    def __init__(self, estimate: LengthEstimate, index: int, prompt_tokens: int) -> None:
        self.estimate = estimate
        self.index = index  # in the estimate
        self.prompt_tokens = -(-prompt_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        self.fresh: OrderedDict[str, Rollout] = OrderedDict()
        self.started = 0
        self.live = 0
        self.homes: dict[int, int] = {}  # index in the fleet -> residents there


class ExpectedKV:
    """Fill every replica to the brim of its expected KV; the longest-expected groups start first."""

    name = "expected_kv"
    need = "its context and one more"

    def __init__(self, fleet: Fleet, *, risk: float = 0.01) -> None:
        if not 0.0 < risk < 0.5:
            raise ValueError(f"risk {risk} must lie between 0 and 0.5: the share of rollouts an engine may preempt")
        self.fleet = fleet
        self.risk = risk
        self.z = NormalDist().inv_cdf(1.0 - risk / LOOKS)
        self._z_least = self.z
        self.horizons_H: Floats = np.zeros(NUM_HORIZONS)
        self._estimates: dict[tuple[int, int], LengthEstimate] = {}
        self._groups: dict[str, Group] = {}
        self._order: list[tuple[int, float, int, Group]] = []  # heap: probes done, minus expected length, tie
        self._resumed: OrderedDict[str, Rollout] = OrderedDict()
        self._arrivals: deque[Rollout] = deque()  # fresh ones, oldest first; those that have started are skipped
        self._profiles: dict[str, Profile] = {}
        self._peak_S: Floats = np.zeros(0)  # expected demand at the worst horizon; inf: closed
        self._variance_S: Floats = np.zeros(0)  # there
        self._capacity_S: Floats = np.zeros(0)
        self._exact_S: list[bool] = []  # measured; False: what was measured, and what was admitted since
        self._picks = 0
        self._learnt_at = -1
        self._observed = 0
        self._fresh: dict[int, FreshRows] = {}  # by id of the estimate
        self._turned: list[Rollout] = []  # rollouts at a turn boundary, since the last look for moves
        self._moved_tokens = 0

    # -- who goes next --------------------------------------------------------------------------------------------
    def submitted(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            group = self._know(rollout)
            load = rollout.load
            if load.context_tokens == load.prompt_tokens and rollout.prefer is None:
                group.fresh[load.rollout_id] = rollout
                self._arrivals.append(rollout)
            else:
                self._resumed[load.rollout_id] = rollout
        self._learnt_at = -1  # new groups must be ranked

    def _know(self, rollout: Rollout) -> Group:
        load = rollout.load
        group = self._groups.get(load.group_id)
        if group is None:
            estimate = self._estimate_of(load.max_response_tokens, load.max_turns)
            group = self._groups[load.group_id] = Group(estimate, estimate.add_group(load.group_id), load.prompt_tokens)
        if rollout.length_row < 0:
            rollout.length_row = group.estimate.start(group.index, load.response_tokens)
            group.live += 1
        return group

    def unqueue(self, rollout: Rollout) -> None:
        self._resumed.pop(rollout.load.rollout_id, None)
        if self._groups[rollout.load.group_id].fresh.pop(rollout.load.rollout_id, None) is not None:
            self._groups[rollout.load.group_id].started += 1

    def _estimate_of(self, max_response_tokens: int, max_turns: int) -> LengthEstimate:
        estimate = self._estimates.get((max_response_tokens, max_turns))
        if estimate is None:
            estimate = self._estimates[max_response_tokens, max_turns] = LengthEstimate(max_response_tokens)
            if max_response_tokens > self.horizons_H[-1]:
                self._stretch(max_response_tokens)
        return estimate

    def withdrawn(self, rollout: Rollout) -> None:
        if rollout.length_row < 0:
            return  # never seen here
        self.unqueue(rollout)
        group = self._groups[rollout.load.group_id]
        group.estimate.drop(rollout.length_row)
        self._forget(rollout, group)

    def _forget(self, rollout: Rollout, group: Group) -> None:
        rollout.length_row = -1
        group.live -= 1
        if group.live == 0:
            del self._groups[rollout.load.group_id]

    def pick(self) -> tuple[Rollout, Replica] | None:
        self._learn()
        rollout = self._next()
        if rollout is None:
            return None
        replica = self._place(rollout)
        if replica is None:
            return None
        self._picks += 1
        rollout.prefer = None
        if self._resumed.pop(rollout.load.rollout_id, None) is None:
            group = self._groups[rollout.load.group_id]
            del group.fresh[rollout.load.rollout_id]
            group.started += 1
            if self._order and self._order[0][3] is group:
                _, length, tie, _ = heapq.heappop(self._order)
                if group.fresh:
                    heapq.heappush(self._order, (min(group.started, PROBES), length, tie, group))
        return rollout, replica

    def _next(self) -> Rollout | None:
        """Interrupted ones; now and then the oldest; else the group with fewest probes, then the longest-expected."""
        if self._resumed:
            return next(iter(self._resumed.values()))
        if self._picks % OLDEST_EVERY == OLDEST_EVERY - 1:
            while self._arrivals:
                rollout = self._arrivals[0]
                if rollout.replica is None and rollout.length_row >= 0:
                    return rollout
                self._arrivals.popleft()
        while self._order and not self._order[0][3].fresh:
            heapq.heappop(self._order)
        return next(iter(self._order[0][3].fresh.values())) if self._order else None

    def _learn(self) -> None:
        """Refresh the estimate and the ranking, where enough has been seen since the last time."""
        patience = max(min(LEARN_EVERY, 4 + len(self._groups) // 4), self._observed // 100)
        if self._learnt_at >= 0 and self._observed < self._learnt_at + patience:
            return
        self._learnt_at = self._observed
        self._note_survivors()
        lengths: dict[int, Floats] = {}
        for estimate in self._estimates.values():
            estimate.refresh()
            groups_G = np.arange(estimate.num_groups)
            ages_G = np.zeros(estimate.num_groups)
            lengths[id(estimate)] = estimate.mean_remaining(groups_G, ages_G)
            alive_GH, covariance_GH = estimate.survivals(groups_G, ages_G, self.horizons_H)
            demand_GH, variance_GH = _rows(ages_G, self.horizons_H, alive_GH, covariance_GH, np.zeros((1, 1)))
            shared_GH = covariance_GH * (self.horizons_H + BLOCK_TOKENS / 2) ** 2
            peaks_G3 = np.stack([demand_GH.max(axis=1), variance_GH.max(axis=1), shared_GH.max(axis=1)], axis=1)
            self._fresh[id(estimate)] = FreshRows(
                demand_GH, variance_GH, shared_GH, list(map(tuple, peaks_G3.tolist()))
            )
        self._order = [
            (min(group.started, PROBES), -float(lengths[id(group.estimate)][group.index]), tie, group)
            for tie, group in enumerate(self._groups.values())
            if group.fresh
        ]
        heapq.heapify(self._order)

    def _note_survivors(self) -> None:
        """Tell the estimates how far every resident has come: ends are known at once, and must not be counted alone."""
        ages: dict[int, tuple[list[int], list[float]]] = {key: ([], []) for key in map(id, self._estimates.values())}
        for replica_id, profile in self._profiles.items():
            step = self.fleet.by_id[replica_id].decode_step
            for rollout in profile.rollouts:
                load = rollout.load
                length_rows, known = ages[id(self._groups[load.group_id].estimate)]
                length_rows.append(rollout.length_row)
                known.append(min(load.response_tokens + step - rollout.step_seen, load.max_response_tokens - 1))
        for estimate in self._estimates.values():
            length_rows, known = ages[id(estimate)]
            estimate.survive(np.array(length_rows, dtype=np.int64), np.array(known))

    # -- where it goes --------------------------------------------------------------------------------------------
    def _place(self, rollout: Rollout) -> Replica | None:
        """The replica with most room after admission, counting a cached prompt as room; ties rotate."""
        group = self._groups[rollout.load.group_id]
        needed = self.needed_tokens(rollout.load)
        preferred = self.fleet.by_id.get(rollout.prefer) if rollout.prefer is not None else None
        if preferred is not None and preferred.open and preferred.has_seat and preferred.kv_capacity_tokens >= needed:
            return preferred  # how much it will need was weighed when the move was decided
        peaks = self._peaks_of(rollout, group)
        while True:
            best, room = self._roomiest(group, peaks)
            if best < 0:
                if self._measure_loose():
                    continue
                return None
            replica = self.fleet.by_index[best]
            assert replica is not None
            if replica.kv_capacity_tokens < needed:
                return self._place_among_large(rollout, group, needed)
            if room >= CLEAR_ROOM * replica.kv_capacity_tokens:
                return replica
            if not self._exact_S[best]:
                self._measure(replica)
            elif self._fits(replica, rollout, group):
                return replica
            elif not self._measure_loose():
                return None

    def _place_among_large(self, rollout: Rollout, group: Group, needed: int) -> Replica | None:
        """As `_place`, where the roomiest replica is too small ever to hold it: the roomiest of those that could."""
        self._measure_loose()
        large = [r for r in self.fleet.open() if r.has_seat and r.kv_capacity_tokens >= needed]
        best = max(large, key=lambda r: (not r.residents, r.kv_capacity_tokens - self._peak_S[r.index]), default=None)
        return best if best is not None and self._fits(best, rollout, group) else None

    def _roomiest(self, group: Group, peaks: tuple[float, float, float]) -> tuple[int, float]:
        """The open replica (its index) with most room after an admission, and that room: -1 where none is open.

        Siblings there save a prompt, which counts as room, but share the newcomer's fate, which takes some. Between two
        measurements peaks and variances are summed as if all came at the worst horizon.
        """
        if len(self._peak_S) == 0:
            return -1, -inf
        demand, variance, shared = peaks
        free_S = self._capacity_S - self._peak_S - (demand + group.prompt_tokens)
        room_S = free_S - self.z * np.sqrt(self._variance_S + variance)
        for index, siblings in group.homes.items():
            spread = sqrt(self._variance_S[index] + variance + 2.0 * siblings * shared)
            room_S[index] = free_S[index] + PROMPT_WORTH * group.prompt_tokens - self.z * spread
        first = self._picks % len(room_S)  # ties rotate
        best = (int(np.concatenate([room_S[first:], room_S[:first]]).argmax()) + first) % len(room_S)
        if room_S[best] == -inf:
            return -1, -inf
        prefill_saved = (
            (PROMPT_WORTH - 1) * group.prompt_tokens if best in group.homes else 0
        )  # worth much, but no room
        return best, float(room_S[best]) - prefill_saved

    def _peaks_of(self, rollout: Rollout, group: Group) -> tuple[float, float, float]:
        """Demand, variance and covariance with a sibling, at most."""
        if rollout.load.response_tokens == 0:
            return self._fresh[id(group.estimate)].peaks_G[group.index]
        demand_H, variance_H, shared_H = self._rows_of(rollout, group)
        return float(demand_H.max()), float(variance_H.max()), float(shared_H.max())

    def _fits(self, replica: Replica, rollout: Rollout, group: Group) -> bool:
        """Exactly, against the replica's profile; an empty replica takes whatever its cache can hold."""
        if not replica.has_seat or replica.kv_capacity_tokens < self.needed_tokens(rollout.load):
            return False
        if not replica.residents:
            return True
        profile = self._profile(replica)
        prompt, (demand_H, variance_H, shared_H) = group.prompt_tokens, self._rows_of(rollout, group)
        if siblings := group.homes.get(replica.index, 0):
            prompt, variance_H = 0, variance_H + 2.0 * siblings * shared_H
        spread_H = np.sqrt(np.maximum(profile.variance_H + variance_H, 0.0))
        peak = float((profile.demand_H + demand_H + self.z * spread_H).max())
        return peak + prompt + self._beside(replica, profile) <= replica.kv_capacity_tokens

    def _rows_of(self, rollout: Rollout, group: Group) -> tuple[Floats, Floats, Floats]:
        """[H] each: demand, variance alone, and covariance with one sibling of its age."""
        response = rollout.load.response_tokens
        if response == 0:
            fresh = self._fresh[id(group.estimate)]
            return fresh.demand_GH[group.index], fresh.variance_GH[group.index], fresh.shared_GH[group.index]
        age_1 = np.array([float(min(response, rollout.load.max_response_tokens - 1))])
        alive_1H, shared_1H = group.estimate.survivals(np.array([group.index]), age_1, self.horizons_H)
        demand_1H, variance_1H = _rows(age_1, self.horizons_H, alive_1H, shared_1H, np.zeros((1, 1)))
        return demand_1H[0], variance_1H[0], shared_1H[0] * (response + self.horizons_H + BLOCK_TOKENS / 2) ** 2

    def _profile(self, replica: Replica) -> Profile:
        """The replica's profile, with the rows of all residents."""
        profile = self._profiles[replica.replica_id]
        if profile.pending:
            self._ensure_fresh(profile)
            rows = [self._rows_of(rollout, self._groups[rollout.load.group_id]) for rollout in profile.pending]
            beside = [self._groups[rollout.load.group_id].homes[replica.index] - 1 for rollout in profile.pending]
            variance_RH = np.array([row[1] for row in rows])
            shared_RH = np.array([row[2] for row in rows])
            profile.fill(np.array([row[0] for row in rows]), variance_RH + np.array(beside)[:, None] * shared_RH)
        return profile

    def _ensure_fresh(self, profile: Profile) -> None:
        """Rows exist for every pending rollout's group, those adopted without a ranking among them."""
        for rollout in profile.pending:
            group = self._groups[rollout.load.group_id]
            fresh = self._fresh.get(id(group.estimate))
            if fresh is None or group.index >= len(fresh.peaks_G):
                self._learnt_at = -1
                self._learn()

    def _measure_loose(self) -> bool:
        """Measure every replica of which only a bound is known; False: there was none."""
        loose = [r for r in self.fleet.by_index if r is not None and not self._exact_S[r.index]]
        for replica in loose:
            self._measure(replica)
        return bool(loose)

    def needed_tokens(self, load: RolloutLoad) -> int:
        return load.context_tokens + 1

    def _beside(self, replica: Replica, profile: Profile) -> float:
        """Tokens that the profile's rows do not show: prompts, growth since, and what the engine reports on top."""
        growth = len(profile.rollouts) * max(0.0, replica.decode_step - profile.fresh_at)
        unexplained = replica.load.kv_used_tokens - (profile.demand_H[0] + profile.prompt_tokens + growth)
        return profile.prompt_tokens + growth + max(0.0, unexplained)

    def _measure(self, replica: Replica) -> None:
        """Note exactly what this replica's residents will need."""
        index = replica.index
        self._exact_S[index] = True
        self._capacity_S[index] = replica.kv_capacity_tokens
        self._peak_S[index], self._variance_S[index] = inf, 0.0
        if replica.open and replica.has_seat:
            profile = self._profile(replica)
            variance_H = np.maximum(profile.variance_H, 0.0)
            worst = int((profile.demand_H + self.z * np.sqrt(variance_H)).argmax())
            self._peak_S[index] = profile.demand_H[worst] + self._beside(replica, profile)
            self._variance_S[index] = variance_H[worst]

    # -- what happens ---------------------------------------------------------------------------------------------
    def admitted(self, rollout: Rollout) -> None:
        replica = rollout.replica
        assert replica is not None
        group = self._know(rollout)
        fresh = self._fresh.get(id(group.estimate))
        index, siblings = replica.index, group.homes.get(replica.index, 0)
        profile = self._profiles[replica.replica_id]
        profile.append(rollout)
        group.homes[index] = siblings + 1
        if siblings == 0:
            profile.prompt_tokens += group.prompt_tokens
        self._exact_S[index] = not replica.has_seat
        if not replica.has_seat:
            self._peak_S[index] = inf
        elif fresh is not None and group.index < len(fresh.peaks_G):
            demand, variance, shared = self._peaks_of(rollout, group)
            self._peak_S[index] += demand + (0 if siblings else group.prompt_tokens)
            self._variance_S[index] += variance + 2.0 * siblings * shared
        else:  # adopted before it could be ranked: closed until measured
            self._peak_S[index] = inf

    def grown(self, rollout: Rollout) -> None:
        self._observed += 1
        group = self._groups[rollout.load.group_id]
        group.estimate.grow(rollout.length_row, rollout.load.response_tokens)
        self._turned.append(rollout)

    def released(self, rollout: Rollout, *, ended: bool, truncated: bool) -> None:
        replica = rollout.replica
        assert replica is not None
        group = self._groups[rollout.load.group_id]
        self._observed += 1
        profile = self._profile(replica)
        profile.pop(rollout)
        group.homes[replica.index] -= 1
        if group.homes[replica.index] == 0:
            del group.homes[replica.index]
            profile.prompt_tokens -= group.prompt_tokens
        if ended:
            group.estimate.end(rollout.length_row, rollout.load.response_tokens, truncated=truncated)
            self._forget(rollout, group)
            self.z = max(self._z_least, self.z - Z_STEP * self.risk)
        self._measure(replica)

    def reported(self, replica: Replica, new_preemptions: int) -> None:
        if new_preemptions > 0:
            self.z = min(self.z + Z_STEP, self._z_least + Z_SPAN)
        profile = self._profile(replica)
        patience = REFRESH_STEPS if self._order or self._resumed else 4 * REFRESH_STEPS
        if profile.rollouts and replica.decode_step >= profile.fresh_at + patience:
            self._refresh(replica, profile)
        self._measure(replica)

    def _refresh(self, replica: Replica, profile: Profile) -> None:
        """All residents' rows anew, from their ages now."""
        step = replica.decode_step
        groups = [self._groups[rollout.load.group_id] for rollout in profile.rollouts]
        age_R = np.array([
            min(r.load.response_tokens + step - r.step_seen, r.load.max_response_tokens - 1) for r in profile.rollouts
        ])  # fmt: skip
        index_R = np.array([group.index for group in groups])
        siblings_R1 = np.array([[float(group.homes[replica.index] - 1)] for group in groups])
        estimates = {id(group.estimate): group.estimate for group in groups}
        length_row_R = np.array([rollout.length_row for rollout in profile.rollouts])
        if len(estimates) == 1:
            groups[0].estimate.survive(length_row_R, age_R)
            alive_RH, shared_RH = groups[0].estimate.survivals(index_R, age_R, self.horizons_H)
        else:
            alive_RH, shared_RH = np.zeros((2, len(groups), NUM_HORIZONS))
            for key, estimate in estimates.items():
                rows = np.array([row for row, group in enumerate(groups) if id(group.estimate) == key])
                estimate.survive(length_row_R[rows], age_R[rows])
                alive_RH[rows], shared_RH[rows] = estimate.survivals(index_R[rows], age_R[rows], self.horizons_H)
        profile.replace(*_rows(age_R, self.horizons_H, alive_RH, shared_RH, siblings_R1))
        profile.fresh_at = step

    def replicas_changed(self) -> None:
        missing = len(self.fleet.by_index) - len(self._exact_S)
        self._peak_S = np.concatenate([self._peak_S, np.full(missing, inf)])
        self._variance_S, self._capacity_S = (
            np.concatenate([values_S, np.zeros(missing)]) for values_S in (self._variance_S, self._capacity_S)
        )
        self._exact_S += [True] * missing
        for replica_id in self._profiles.keys() - self.fleet.by_id.keys():
            del self._profiles[replica_id]
        for index, replica in enumerate(self.fleet.by_index):
            if replica is None:
                self._peak_S[index], self._exact_S[index] = inf, True
                continue
            self._profiles.setdefault(replica.replica_id, Profile(NUM_HORIZONS))
            self._measure(replica)

    def remember(self, max_response_tokens: int, max_turns: int, ended: Sequence[tuple[str, float, bool]]) -> None:
        """Lengths of an earlier step or run: (group, response tokens, truncated)."""
        self._estimate_of(max_response_tokens, max_turns).remember(ended)
        self._renumber()

    def new_policy_version(self) -> None:
        """The weights changed: what was learned of lengths fades."""
        for estimate in self._estimates.values():
            estimate.forget_finished()
        self._renumber()

    def _renumber(self) -> None:
        """The estimate has forgotten finished groups, and counts the others anew."""
        for group_id, group in self._groups.items():
            group.index = group.estimate.add_group(group_id)
        self._learnt_at = -1

    def _stretch(self, max_response_tokens: int) -> None:
        """Horizons reach to the longest life: dense at first, where most is certain."""
        self.horizons_H = max_response_tokens * (np.arange(NUM_HORIZONS) / (NUM_HORIZONS - 1)) ** 1.5
        self._learnt_at = -1
        for replica_id, profile in self._profiles.items():
            if profile.rollouts:
                self._refresh(self.fleet.by_id[replica_id], self._profile(self.fleet.by_id[replica_id]))

    # -- between turns --------------------------------------------------------------------------------------------
    def moves(self) -> Sequence[Move]:
        """For rollouts at a turn boundary: away from a replica about to overflow, and, once nothing waits, from a full
        one to one less than half as full, where enough is still to come.

        A move computes the context again, so it must be repaid by faster tokens, and all of them together stay within
        a small share of the tokens generated.
        """
        turned, self._turned = self._turned, []
        idle = not self._order and not self._resumed
        moves: list[Move] = []
        used: dict[str, float] = {}
        for rollout in turned:
            source = rollout.replica
            if source is None or rollout.prefer is not None:
                continue
            context = rollout.load.context_tokens
            pressed = self._peak(source) > source.kv_capacity_tokens
            if not idle and not pressed:
                continue
            share = PRESSED_SHARE if pressed else MOVE_SHARE
            if self._moved_tokens + context > share * self.fleet.generated_tokens:
                continue
            used = used or {replica.replica_id: self._used(replica) for replica in self.fleet.open()}
            target = self._relief(rollout, source) if pressed else self._move_target(rollout, source, used)
            if target is None:
                continue
            rollout.prefer = target
            self._moved_tokens += context
            used[target] += context
            used[source.replica_id] = used.get(source.replica_id, 0.0) - context
            moves.append(Move(rollout.load.rollout_id, source.replica_id, target))
        return moves

    def _move_target(self, rollout: Rollout, source: Replica, used: dict[str, float]) -> str | None:
        """The emptiest other replica, where moving there is worth it."""
        target = min((name for name in used if name != source.replica_id), key=used.__getitem__, default=None)
        if target is None:
            return None
        context = rollout.load.context_tokens
        if used[target] + context > 0.5 * (self._used(source) - context):
            return None
        group = self._groups[rollout.load.group_id]
        age_1 = np.array([float(rollout.load.response_tokens)])
        if MOVE_GAIN * group.estimate.mean_remaining(np.array([group.index]), age_1)[0] < context:
            return None
        fits = self._fits(self.fleet.by_id[target], rollout, group)
        return target if fits else None

    def _relief(self, rollout: Rollout, source: Replica) -> str | None:
        """The replica with the lowest peak ahead, where the rollout would leave it below its cache and the source."""
        others = [r for r in self.fleet.open() if r is not source and r.has_seat]
        target = min(others, key=lambda r: self._peak(r) / r.kv_capacity_tokens, default=None)
        if target is None:
            return None
        group = self._groups[rollout.load.group_id]
        prompt = 0 if target.index in group.homes else group.prompt_tokens
        peak = self._peak(target, self._rows_of(rollout, group)) + prompt
        return target.replica_id if peak <= min(target.kv_capacity_tokens, self._peak(source)) else None

    def _peak(self, replica: Replica, more: tuple[Floats, Floats, Floats] | None = None) -> float:
        """The most KV that its residents, and a newcomer's rows, are likely to need from now on."""
        profile = self._profile(replica)
        demand_H, variance_H = profile.demand_H, profile.variance_H
        if more is not None:
            demand_H, variance_H = demand_H + more[0], variance_H + more[1]
        spread_H = np.sqrt(np.maximum(variance_H, 0.0))
        return float((demand_H + PRESSED_Z * spread_H).max()) + self._beside(replica, profile)

    def _used(self, replica: Replica) -> float:
        profile = self._profile(replica)
        return float(profile.demand_H[0]) + profile.prompt_tokens


def _rows(
    age_N: Floats, horizon_H: Floats, alive_NH: Floats, shared_NH: Floats, siblings_N1: Floats
) -> tuple[Floats, Floats]:
    """Demand and variance [N, H]; half a block is lost to rounding by every rollout."""
    size_NH = age_N[:, None] + horizon_H[None, :] + BLOCK_TOKENS / 2
    demand_NH = size_NH * alive_NH
    return demand_NH, size_NH * size_NH * (alive_NH * (1.0 - alive_NH) + siblings_N1 * shared_NH)
