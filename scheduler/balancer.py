"""The balancer keeps the state of rollouts and replicas, and asks the rule where rollouts run. No clock, no Ray.

The caller sets `now_s` before it calls; without that the balancer decides the same, and reports no waiting times.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import Any

from rstar_ray.config import BalancerConfig
from rstar_ray.run_dir.metrics import BalancerStats
from scheduler.expected_kv.caution import Caution
from scheduler.expected_kv.learned import Learned
from scheduler.expected_kv.rule import ExpectedKV
from scheduler.quarantine import impossible_lengths, impossible_load
from scheduler.records import (
    BalancerSnapshot,
    Cancel,
    Grant,
    Move,
    NeverFits,
    Order,
    Quarantined,
    Registration,
    ReplicaLoad,
    RolloutLoad,
    TurnReport,
)
from scheduler.rules import (
    Change,
    ConsistentHash,
    LeastRequests,
    LeastSessions,
    PlacementRule,
    PrefixAware,
    RoundRobin,
    Static,
    WorstCase,
)
from scheduler.state import Replica, Rollout, State
from scheduler.statistics import SAMPLE_EVERY_S, StepStatistics

log = logging.getLogger(__name__)

MakeRule = Callable[[State], PlacementRule]
BASELINES: dict[str, MakeRule] = {
    rule.name: rule
    for rule in (Static, RoundRobin, ConsistentHash, LeastRequests, LeastSessions, PrefixAware, WorstCase)
}
RULES = (*BASELINES, ExpectedKV.name)
PLACEMENT = BalancerConfig()
"""The default placement configuration."""


class Balancer:
    """Receives events; `decide` returns the resulting admissions and moves.

    Every rollout is either waiting or resident on one replica. Reports about a rollout by a replica that does not hold
    it are counted as stale and ignored. A waiting rollout that is larger than every replica that takes work is parked,
    so that others do not wait behind it; `snapshot` lists it, and it is queued again when a replica can hold it.
    """

    def __init__(self, rule: str | MakeRule = PLACEMENT.rule, placement: BalancerConfig = PLACEMENT) -> None:
        """`rule`: a name in `RULES`, or a factory of another rule. `placement`: settings of `expected_kv`."""
        self.now_s = 0.0
        self.orders: list[tuple[str, Order]] = []  # (replica, order); the caller removes orders after sending them
        self.state = State()
        self._learner = ExpectedKV(self.state, Caution(placement)) if rule == ExpectedKV.name else None
        self.rule: PlacementRule = self._learner or _baseline(rule, self.state)
        self._statistics = StepStatistics(self.snapshot())
        self._policy_version: int | None = None
        self._parked_before = 0
        self._was_idle = False

    # -- replicas -------------------------------------------------------------------------------------------------
    def register(self, replica: Registration) -> list[str]:
        """Add a replica; returns those of its residents that it must stop, because another replica holds them.

        A known replica with that name is removed first. Unknown residents are added, as after the balancer's restart.
        """
        orphans = self._remove(replica.replica_id)
        added = self.state.add_replica(replica)
        self._replicas_changed()
        stop = [load.rollout_id for load in replica.resident if not self._adopt(load, added)]
        self._cancel_unknown(orphans)
        return stop

    def _adopt(self, load: RolloutLoad, replica: Replica) -> bool:
        """Record that the rollout runs on this replica; False if another replica holds it."""
        rollout = self.state.rollouts.get(load.rollout_id)
        if rollout is None:
            rollout = self.state.add_rollout(load, self.now_s)
            self._enqueue([rollout])
        elif rollout.replica is not None:
            return rollout.replica is replica
        rollout.load = load
        self._settle(rollout, replica)
        return True

    def replica_lost(self, replica_id: str) -> list[str]:
        """Remove a replica; its residents wait again, from their last reported turn. Returns their ids.

        A rollout without a payload (an earlier incarnation of the balancer granted it) must be submitted again.
        """
        orphans = self._remove(replica_id)
        self._cancel_unknown(orphans)
        return [rollout.load.rollout_id for rollout in orphans]

    def _remove(self, replica_id: str) -> list[Rollout]:
        if replica_id not in self.state.replicas:
            return []
        orphans = list(self.state.replicas[replica_id].residents.values())
        for rollout in orphans:
            self._leave(rollout, Change.REQUEUED)
        self.state.remove_replica(replica_id)
        self._replicas_changed()
        self._requeue(orphans)
        return orphans

    def _cancel_unknown(self, orphans: Iterable[Rollout]) -> None:
        """Drop rollouts without a payload, which only the submitter can supply."""
        self.cancel([one.load.rollout_id for one in orphans if not one.has_payload and one.replica is None])

    def set_serving(self, replica_id: str, serving: bool) -> None:
        """`serving` False drains a replica: it gets no new rollouts, and its residents stay."""
        self.state.replica(replica_id).serving = serving
        self._replicas_changed()

    def _quarantine(self, replica: Replica, reason: str) -> None:
        if replica.quarantine != reason:
            log.warning(f"{replica.replica_id} is in quarantine and restarts: it {reason}")
            self._statistics.quarantined(replica.replica_id, reason)
        replica.quarantine = reason
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        """Park rollouts that the largest open replica cannot hold, and queue parked ones that it can hold."""
        state = self.state
        self.rule.replicas_changed()
        before = state.largest_open_tokens
        state.largest_open_tokens = max((r.kv_capacity_tokens for r in state.open()), default=before)
        if state.largest_open_tokens > before:
            parked, state.parked = state.parked, {}
            self._enqueue(list(parked.values()))
        elif state.largest_open_tokens < before:
            for rollout_id, rollout in state.rollouts.items():
                if rollout.replica is None and rollout_id not in state.parked and self._fits_nowhere(rollout):
                    self._park(rollout)

    # -- policy versions and learned state ------------------------------------------------------------------------
    def set_policy_version(self, policy_version: int) -> None:
        """All replicas serve this version: lengths learned under earlier ones lose weight. A repeated call changes
        nothing."""
        if self._learner is not None and policy_version != self._policy_version:
            self._learner.new_policy_version()
        self._policy_version = policy_version

    def add_history(
        self, max_response_tokens: int, max_turns: int, ended: Sequence[tuple[str, float, bool]], *, growth: float = 1.0
    ) -> None:
        """Add an earlier step. `ended`: (group, sampled tokens, truncated); `growth`: response to sampled."""
        if self._learner is not None:
            self._learner.lengths.add_history(max_response_tokens, max_turns, ended, growth=growth)

    def learned(self) -> Learned | None:
        """The rule's learned state; None for a rule without state."""
        return self._learner.learned() if self._learner is not None else None

    def load_learned(self, learned: Learned) -> None:
        """Load the state of a checkpoint, or of an earlier incarnation."""
        if self._learner is not None:
            self._learner.load_learned(learned)

    # -- rollouts -------------------------------------------------------------------------------------------------
    def submit(self, loads: Sequence[RolloutLoad], payloads: Sequence[Any] | None = None) -> None:
        """Queue new rollouts; known ones keep their state, and get a payload if they have none.

        Raises `NeverFits`, before any of them is queued, if one is larger than every replica.
        """
        state, fresh = self.state, list[Rollout]()
        largest = max((replica.kv_capacity_tokens for replica in state.replicas.values()), default=inf)
        for load in loads:
            needed = self.rule.needed_tokens(load)
            if needed > largest and load.rollout_id not in state.rollouts:
                raise NeverFits(load.rollout_id, needed, int(largest), self.rule.need)
        for load, payload in zip(loads, payloads or [None] * len(loads), strict=True):
            rollout = state.rollouts.get(load.rollout_id)
            if rollout is None:
                rollout = state.add_rollout(load, self.now_s)
                self._statistics.wait_begins(rollout, self.now_s)
                fresh.append(rollout)
            if not rollout.has_payload:
                rollout.payload, rollout.has_payload = payload, True
        self._enqueue(fresh)

    def cancel(self, rollout_ids: Iterable[str]) -> None:
        """Remove rollouts; replicas that run one are ordered to stop it."""
        for rollout_id in rollout_ids:
            rollout = self.state.rollouts.pop(rollout_id, None)
            if rollout is None:
                self.state.stale_reports += 1
                continue
            self.state.cancelled += 1
            if rollout.replica is not None:
                self.orders.append((rollout.replica.replica_id, Cancel(rollout_id)))
                # CUT, not ENDED: the estimate must not learn that rollouts are this short.
                self._leave(rollout, Change.CUT)
            elif self.state.parked.pop(rollout_id, None) is None:
                del self.state.queue[rollout_id]
                self.rule.rollout_changed(rollout, Change.WITHDRAWN)

    def report(
        self,
        replica_id: str,
        turns: Sequence[TurnReport] = (),
        load: ReplicaLoad | None = None,
    ) -> None:
        """Process a replica's report: turns and rollouts that ended there, and its engine's load.

        An impossible report puts the replica into quarantine; its lengths are clamped to possible values. Raises
        `UnknownReplica` if the replica must register, and `Quarantined`, with everything processed, if it must restart.
        """
        replica = self.state.replica(replica_id)
        for turn in turns:
            if (rollout := self.state.held(replica_id, turn.rollout_id)) is None:
                continue
            self._update_lengths(rollout, replica, turn)
            if turn.ended:
                self.state.end_rollout(turn.rollout_id, replica_id)
                self._leave(rollout, Change.CUT if turn.truncated else Change.ENDED)
            else:
                self.rule.rollout_changed(rollout, Change.TURN_ENDED)
        if load is not None:
            self._engine_reported(replica, load)
        if replica.quarantine is not None:
            raise Quarantined(f"{replica_id} is in quarantine: it {replica.quarantine}")

    def _update_lengths(self, rollout: Rollout, replica: Replica, report: TurnReport) -> None:
        reason = impossible_lengths(rollout.load, report)
        self.state.update_lengths(rollout, report)
        if reason is not None:
            self._quarantine(replica, reason)

    def _engine_reported(self, replica: Replica, load: ReplicaLoad) -> None:
        if (reason := impossible_load(replica, load)) is not None:
            self._quarantine(replica, reason)
            return
        new_preemptions = load.preemptions - replica.load.preemptions
        self.state.count_preemptions(replica, new_preemptions)
        replica.update(load)
        self.rule.replica_reported(replica, new_preemptions)

    def return_rollouts(self, replica_id: str, items: Sequence[tuple[RolloutLoad, Any]]) -> None:
        """Queue rollouts that a replica hands back with payloads, after a move or its engine's death."""
        returned: list[Rollout] = []
        for load, payload in items:
            if (rollout := self.state.held(replica_id, load.rollout_id)) is None:
                continue
            self.state.generated_tokens += max(0, load.generated_tokens - rollout.load.generated_tokens)
            rollout.load, rollout.payload, rollout.has_payload = load, payload, True
            self.state.moves += rollout.leaving
            self._leave(rollout, Change.REQUEUED)
            returned.append(rollout)
        self._requeue(returned)

    def _settle(self, rollout: Rollout, replica: Replica) -> None:
        self.state.settle(rollout, replica)
        self.rule.rollout_changed(rollout, Change.ADMITTED)

    def _leave(self, rollout: Rollout, change: Change) -> None:
        self.state.leave(rollout)
        self.rule.rollout_changed(rollout, change)
        rollout.replica = None

    def _requeue(self, rollouts: Sequence[Rollout]) -> None:
        """Queue rollouts that left a replica; the next replica must compute their contexts again."""
        for rollout in rollouts:
            self.state.recomputed_tokens += rollout.load.context_tokens
            self._statistics.wait_begins(rollout, self.now_s)
        self._enqueue(rollouts)

    def _enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Queue rollouts that some replica can hold, and park the others."""
        queued: list[Rollout] = []
        for rollout in rollouts:
            if self._fits_nowhere(rollout):
                self._park(rollout)
            else:
                queued.append(rollout)
        self._queue_by_draw(queued)
        for place, rollout in enumerate(queued):
            rollout.batch = (place, len(queued))
            self.rule.rollout_changed(rollout, Change.QUEUED)

    def _queue_by_draw(self, newcomers: Sequence[Rollout]) -> None:
        """Queue new rollouts behind those of their draw; usually this is the end of the queue."""
        queue = self.state.queue
        for rollout in newcomers:
            queue[rollout.load.rollout_id] = rollout
        in_line = [*queue.values()][-len(newcomers) - 1 :] if newcomers else []
        if any(later.load.draw < earlier.load.draw for earlier, later in pairwise(in_line)):
            for rollout in sorted(queue.values(), key=lambda rollout: rollout.load.draw):
                queue.move_to_end(rollout.load.rollout_id)

    def _fits_nowhere(self, rollout: Rollout) -> bool:
        return self.rule.needed_tokens(rollout.load) > self.state.largest_open_tokens

    def _park(self, rollout: Rollout) -> None:
        self.state.queue.pop(rollout.load.rollout_id, None)
        self.state.parked[rollout.load.rollout_id] = rollout
        self.rule.rollout_changed(rollout, Change.WITHDRAWN)

    # -- decisions ------------------------------------------------------------------------------------------------
    def decide(self, limit: int | None = None) -> tuple[list[tuple[Rollout, Replica]], Sequence[Move]]:
        """All admissions that can start now (at most `limit`), in order, and moves between turns."""
        admissions: list[tuple[Rollout, Replica]] = []
        while limit is None or len(admissions) < limit:
            picked = self.rule.pick()
            if picked is None:
                break
            rollout, replica = picked
            self._settle(rollout, replica)
            self.state.admitted += 1
            replica.admitted_since_report += 1
            admissions.append((rollout, replica))
        return admissions, self.rule.moves()

    def issue_orders(self, limit: int) -> bool:
        """Decide, and append to `orders`; False if there were `limit` admissions, so that there may be more."""
        admissions, moves = self.decide(limit)
        for rollout, replica in admissions:
            self.orders.append((replica.replica_id, self._grant(rollout)))
        for move in moves:
            self.orders.append((move.from_replica, move))
        self._statistics.queue_blocked(self.state.queue_block(), self.now_s)
        self._log_changes()
        if self.now_s >= self._statistics.sampled_s + SAMPLE_EVERY_S:
            self._statistics.sampled_s = self.now_s
            self._statistics.sample(self.snapshot())
        return len(admissions) < limit

    def _grant(self, rollout: Rollout) -> Grant:
        assert rollout.replica is not None
        placement = self.state.placement(
            rollout,
            expected_tokens=self.rule.reserved_tokens(rollout.replica),
            waited_s=round(self.now_s - rollout.waiting_since_s, 3),
            blocked_s=self._statistics.wait_ends(rollout, self.now_s),
        )
        waited_s = self.now_s - rollout.known_since_s
        return Grant(load=rollout.load, payload=rollout.payload, waited_s=waited_s, placement=placement)

    def _log_changes(self) -> None:
        parked = len(self.state.parked)
        if parked > self._parked_before:
            log.warning(f"{parked} waiting rollouts need a larger replica than any that takes work now")
        self._parked_before = parked
        idle = not self.state.rollouts
        if idle and not self._was_idle:
            for leak in self.leaks():
                log.warning(f"no rollout is left, but {leak}")
        self._was_idle = idle

    # -- queries --------------------------------------------------------------------------------------------------
    def residents(self, replica_id: str) -> list[str] | None:
        """Ids of the replica's residents; None if it is not registered."""
        replica = self.state.replicas.get(replica_id)
        return None if replica is None else list(replica.residents)

    def waiting(self, rollout_ids: Iterable[str]) -> list[str]:
        """Those of the given rollouts that are on no replica, including unknown ones."""
        rollouts = self.state.rollouts
        return [name for name in rollout_ids if name not in rollouts or rollouts[name].replica is None]

    def missing(self, rollout_ids: Iterable[str]) -> list[str]:
        """Those of the given rollouts that must be submitted before a worker can receive them: unknown ones, and those
        without a payload. A rollout that ended on a registered replica is not missing: the replica delivers it.
        """
        rollouts, ended = self.state.rollouts, self.state.ended
        return [
            name
            for name in rollout_ids
            if name not in ended and (name not in rollouts or not rollouts[name].has_payload)
        ]

    def snapshot(self) -> BalancerSnapshot:
        reserved = [self.rule.reserved_tokens(replica) for replica in self.state.replicas.values()]
        return self.state.snapshot(self.rule.name, self._learner.risk if self._learner else 0.0, reserved)

    def step_figures(self) -> BalancerStats:
        """Statistics since the last call, which is made when a step has all its rollouts."""
        return self._statistics.take(self.snapshot(), self.leaks(), self.now_s)

    def leaks(self) -> list[str]:
        """Inconsistent counters; if no rollout is live, also counters that are not zero."""
        if self.state.rollouts:
            return self.state.miscounted()
        return [*self.state.leaks(), *(self._learner.leaks() if self._learner else [])]


def _baseline(rule: str | MakeRule, state: State) -> PlacementRule:
    if not isinstance(rule, str):
        return rule(state)
    if rule not in BASELINES:
        raise ValueError(f"--balancer.rule: unknown rule (got {rule!r}). Hint: use one of {', '.join(RULES)}.")
    return BASELINES[rule](state)
