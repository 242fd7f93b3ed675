"""The balancer: knows every rollout and replica, asks the rule, keeps the books. No clock, no socket, no Ray."""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from rstar_ray.config import BalancerConfig
from scheduler.books import Books, nonsense
from scheduler.expected_kv.caution import Caution
from scheduler.expected_kv.rule import ExpectedKV
from scheduler.fleet import Fleet, Replica, Rollout
from scheduler.learned import Learned
from scheduler.records import (
    Admission,
    BalancerSnapshot,
    Decisions,
    Finished,
    Move,
    NeverFits,
    Registration,
    ReplicaLoad,
    RolloutLoad,
    TurnReport,
)
from scheduler.rules import (
    ConsistentHash,
    LeastRequests,
    LeastSessions,
    PlacementRule,
    PrefixAware,
    RoundRobin,
    Static,
    WorstCase,
)

MakeRule = Callable[[Fleet], PlacementRule]
RULES: dict[str, Callable[..., PlacementRule]] = {
    rule.name: rule
    for rule in (
        Static,
        RoundRobin,
        ConsistentHash,
        LeastRequests,
        LeastSessions,
        PrefixAware,
        WorstCase,
        ExpectedKV,
    )
}

PLACEMENT = BalancerConfig()
"""What holds where nobody says otherwise, as in a run that sets nothing."""


def made_rule(rule: str | MakeRule, fleet: Fleet, placement: BalancerConfig) -> PlacementRule:
    """Raises `ValueError` for the name of none."""
    if rule == ExpectedKV.name:
        return ExpectedKV(fleet, Caution(placement))
    if not isinstance(rule, str):
        return rule(fleet)
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; one of {', '.join(RULES)}")
    return RULES[rule](fleet)


class Balancer:
    """Feed it what happens; `decide` says what to do now.

    Every rollout is in exactly one place: waiting, or resident on one replica. Reports about a rollout by a replica
    that does not hold it (any more) are counted as stale and change nothing. One that waits and is larger than every
    replica that takes work is parked, out of the rule's sight, so that nothing behind it waits for it; `snapshot`
    names it, and it queues again once a replica could hold it.
    """

    def __init__(self, rule: str | MakeRule = PLACEMENT.rule, placement: BalancerConfig = PLACEMENT) -> None:
        """`rule`: the name of one, or what makes one; `placement`: what risk it takes."""
        self.books = Books()
        fleet = self.books.fleet
        self._rule = made_rule(rule, fleet, placement)
        self._largest_open = inf  # capacity among replicas that take work; where none does, as it was

    @property
    def rule(self) -> str:
        """The rule's name."""
        return self._rule.name

    # -- replicas -------------------------------------------------------------------------------------------------
    def add_replica(self, replica: Registration) -> list[str]:
        """A replica serves from now on; one known by that name is removed first. What is resident is for `adopt`.

        Returns the rollouts that wait again, because the name's former holder had them.
        """
        known = replica.replica_id in self.books.fleet.by_id
        lost = self.remove_replica(replica.replica_id) if known else []
        self.books.fleet.add(replica)
        self._replicas_changed()
        return lost

    def remove_replica(self, replica_id: str) -> list[str]:
        """The replica is gone; its residents wait again, from their last reported turn. Returns their ids."""
        replica = self.books.replica(replica_id)
        orphans = list(replica.residents.values())
        for rollout in orphans:
            self._leave(rollout, ended=False)
        self.books.fleet.remove(replica_id)
        self._replicas_changed()
        self._wait_again(orphans)
        return [rollout.load.rollout_id for rollout in orphans]

    def set_serving(self, replica_id: str, serving: bool) -> None:
        """False: nothing new goes there; residents stay."""
        self.books.replica(replica_id).serving = serving
        self._replicas_changed()

    def withdraw_versions(self) -> None:
        """From now on a replica may report a lower one than before."""
        self.books.fleet.withdraw_versions()

    def set_policy_version(self, policy_version: int) -> None:
        """A new version is published to all; lengths learned under the old one fade."""
        self._rule.new_policy_version()
        self.books.fleet.published(policy_version)

    def remember(
        self, max_response_tokens: int, max_turns: int, ended: Sequence[tuple[str, float, bool]], *, growth: float = 1.0
    ) -> None:
        """Teach the rule lengths of an earlier step or run, as `PlacementRule` has them."""
        self._rule.remember(max_response_tokens, max_turns, ended, growth=growth)

    def learned(self) -> Learned | None:
        """What outlives a step, for another life to `know_again`; None where the rule learns nothing."""
        return self._rule.learned()

    def know_again(self, learned: Learned) -> None:
        self._rule.know_again(learned)

    def adopt(self, replica_id: str, loads: Iterable[RolloutLoad]) -> list[str]:
        """These run on the replica already: after our own death. Returns those it must stop: another holds them."""
        replica = self.books.replica(replica_id)
        stop: list[str] = []
        for load in loads:
            rollout = self.books.rollouts.get(load.rollout_id)
            if rollout is None:
                rollout = self.books.new(load)
                self._rule.submitted([rollout])
            elif rollout.replica is not None:
                if rollout.replica is not replica:
                    stop.append(load.rollout_id)
                continue
            if self.books.parked.pop(load.rollout_id, None) is None:
                self._rule.unqueue(rollout)
            rollout.load = load
            self._settle(rollout, replica)
        return stop

    # -- rollouts -------------------------------------------------------------------------------------------------
    def submit(self, loads: Sequence[RolloutLoad]) -> None:
        """These wait for a replica; ones known already, or twice in `loads`, are left as they are.

        Raises `NeverFits` before any of them is queued, with the numbers, where one is larger than every replica.
        """
        fresh: dict[str, RolloutLoad] = {}
        for load in loads:
            if load.rollout_id not in self.books.rollouts:
                fresh.setdefault(load.rollout_id, load)
        largest = self.books.fleet.largest_capacity_tokens
        if self.books.fleet.by_id:
            for load in fresh.values():
                needed = self._rule.needed_tokens(load)
                if needed > largest:
                    raise NeverFits(load.rollout_id, needed, largest, self._rule.need)
        self._queue([self.books.new(load) for load in fresh.values()])

    def cancel(self, rollout_id: str) -> str | None:
        """The rollout is over, wherever it is. Returns the replica that must stop it, if one runs it."""
        rollout = self.books.rollouts.pop(rollout_id, None)
        if rollout is None:
            self.books.stale += 1
            return None
        self.books.cancelled += 1
        replica = rollout.replica
        if replica is None:
            if self.books.parked.pop(rollout_id, None) is None:
                self._rule.withdrawn(rollout)
            return None
        # A cut life is survived, not ended: it must not teach the estimate that rollouts are short.
        self._leave(rollout, ended=True, truncated=True)
        return replica.replica_id

    def turn_finished(self, replica_id: str, report: TurnReport) -> bool:
        """A turn ended and the rollout goes on; False: the replica does not hold it.

        Lengths that cannot be, here or in `finished`, set the replica aside, and count as far as they can be.
        """
        rollout = self.books.held(replica_id, report.rollout_id)
        if rollout is None:
            return False
        self._update(rollout, report)
        self._rule.grown(rollout)
        return True

    def finished(self, replica_id: str, end: Finished) -> bool:
        """The rollout ended; False: the replica does not hold it, and its result must not be used."""
        rollout = self.books.held(replica_id, end.rollout_id)
        if rollout is None:
            return False
        self._update(rollout, end)
        del self.books.rollouts[end.rollout_id]
        self.books.finished += 1
        self._leave(rollout, ended=True, truncated=end.truncated)
        return True

    def returned(self, replica_id: str, loads: Sequence[RolloutLoad]) -> list[str]:
        """Handed back: moved between turns, or their engine died. They wait again; returns those accepted."""
        back: list[Rollout] = []
        for load in loads:
            rollout = self.books.held(replica_id, load.rollout_id)
            if rollout is None:
                continue
            self.books.fleet.generated_tokens += max(0, load.generated_tokens - rollout.load.generated_tokens)
            rollout.load = load
            if rollout.leaving:
                self.books.moves += 1
            self._leave(rollout, ended=False)
            back.append(rollout)
        self._wait_again(back)
        return [rollout.load.rollout_id for rollout in back]

    def replica_report(self, replica_id: str, load: ReplicaLoad) -> str | None:
        """What the engine says of itself. Nonsense sets the replica aside; returns why, if it did so now."""
        replica = self.books.replica(replica_id)
        reason = nonsense(replica, load)
        if reason is not None:
            first = replica.set_aside is None
            self._set_aside(replica, reason)
            return reason if first else None
        new_preemptions = load.preemptions - replica.load.preemptions
        self.books.preempted(replica, new_preemptions)
        replica.note(load)
        self._rule.reported(replica, new_preemptions)
        return None

    # -- decisions ------------------------------------------------------------------------------------------------
    def decide(self, limit: int | None = None) -> Decisions:
        """All admissions that may start now (at most `limit`), and moves between turns."""
        admissions: list[Admission] = []
        while limit is None or len(admissions) < limit:
            picked = self._rule.pick()
            if picked is None:
                break
            rollout, replica = picked
            rollout.why = self._rule.why
            self._settle(rollout, replica)
            self.books.admitted += 1
            replica.admissions += 1
            replica.admitted_since_report += 1
            admissions.append(Admission(rollout.load.rollout_id, replica.replica_id))
        moves: Sequence[Move] = self._rule.moves()
        return Decisions(tuple(admissions), tuple(moves))

    # -- what is known --------------------------------------------------------------------------------------------
    def load_of(self, rollout_id: str) -> RolloutLoad | None:
        rollout = self.books.rollouts.get(rollout_id)
        return None if rollout is None else rollout.load

    def replica_of(self, rollout_id: str) -> str | None:
        rollout = self.books.rollouts.get(rollout_id)
        return rollout.replica.replica_id if rollout is not None and rollout.replica is not None else None

    def residents(self, replica_id: str) -> list[str]:
        return list(self.books.replica(replica_id).residents)

    def knows(self, replica_id: str) -> bool:
        return replica_id in self.books.fleet.by_id

    def set_aside(self, replica_id: str) -> str | None:
        """Why the replica gets no more work, if it was set aside."""
        return self.books.replica(replica_id).set_aside

    def reserved_tokens(self, replica_id: str) -> int:
        """As in `snapshot`."""
        return self._rule.reserved_tokens(self.books.replica(replica_id))

    def snapshot(self) -> BalancerSnapshot:
        replicas = self.books.fleet.by_id.values()
        reserved = [self._rule.reserved_tokens(replica) for replica in replicas]
        return self.books.snapshot(self._rule.name, self._rule.risk, reserved)

    def faults(self) -> list[str]:
        """What is not back to zero now that no rollout is left; nothing is said while one is."""
        return [] if self.books.rollouts else [*self.books.faults(), *self._rule.leftovers()]

    # -- inside ---------------------------------------------------------------------------------------------------
    def _settle(self, rollout: Rollout, replica: Replica) -> None:
        self.books.settle(rollout, replica)
        self._rule.admitted(rollout)

    def _leave(self, rollout: Rollout, *, ended: bool, truncated: bool = False) -> None:
        self.books.leave(rollout)
        self._rule.released(rollout, ended=ended, truncated=truncated)
        rollout.replica = None

    def _update(self, rollout: Rollout, report: TurnReport | Finished) -> None:
        replica = rollout.replica
        assert replica is not None
        reason = self.books.update(rollout, report)
        if reason is not None:
            self._set_aside(replica, reason)

    def _wait_again(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.books.hand_back(rollout)
        self._queue(rollouts)

    def _set_aside(self, replica: Replica, reason: str) -> None:
        replica.set_aside = reason
        self._replicas_changed()

    def _queue(self, rollouts: Sequence[Rollout]) -> None:
        """These wait: the rule sees those that some replica could hold, the others are parked."""
        queued: list[Rollout] = []
        for rollout in rollouts:
            if self._rule.needed_tokens(rollout.load) > self._largest_open:
                self._park(rollout)
            else:
                queued.append(rollout)
        if queued:
            self._rule.submitted(queued)

    def _park(self, rollout: Rollout) -> None:
        self.books.parked[rollout.load.rollout_id] = rollout
        self._rule.withdrawn(rollout)

    def _replicas_changed(self) -> None:
        """Tell the rule, and park or queue again what the largest replica that takes work now can not or can hold."""
        self._rule.replicas_changed()
        before = self._largest_open
        self._largest_open = max((r.kv_capacity_tokens for r in self.books.fleet.open()), default=before)
        if self._largest_open > before:
            parked, self.books.parked = self.books.parked, {}
            self._queue(list(parked.values()))
        elif self._largest_open < before:
            for rollout in self.books.rollouts.values():
                waits = rollout.replica is None and rollout.load.rollout_id not in self.books.parked
                if waits and self._rule.needed_tokens(rollout.load) > self._largest_open:
                    self._park(rollout)
