"""The balancer: knows every rollout and replica, asks the rule, keeps the books. No clock, no socket, no Ray."""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from scheduler.expected_kv.rule import ExpectedKV
from scheduler.fleet import Fleet, Replica, Rollout
from scheduler.load import (
    Admission,
    BalancerSnapshot,
    Decisions,
    Finished,
    Move,
    NeverFits,
    ReplicaLoad,
    RolloutLoad,
    TurnReport,
    UnknownReplica,
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

RULES: dict[str, Callable[[Fleet], PlacementRule]] = {
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


class Balancer:
    """Feed it what happens; `decide` says what to do now.

    Every rollout is in exactly one place: waiting, or resident on one replica. Reports about a rollout by a replica
    that does not hold it (any more) are counted as stale and change nothing. One that waits and is larger than every
    replica that takes work is parked, out of the rule's sight, so that nothing behind it waits for it; `snapshot`
    names it, and it queues again once a replica could hold it.
    """

    def __init__(self, rule: str | Callable[[Fleet], PlacementRule] = "expected_kv", *, risk: float = 0.01) -> None:
        """`rule`: the name of one, or what makes one."""
        self._fleet = Fleet()
        if rule == ExpectedKV.name:
            self._rule: PlacementRule = ExpectedKV(self._fleet, risk=risk)
        elif isinstance(rule, str):
            if rule not in RULES:
                raise ValueError(f"rule {rule!r} is unknown; one of {', '.join(RULES)}")
            self._rule = RULES[rule](self._fleet)
        else:
            self._rule = rule(self._fleet)
        self._rollouts: dict[str, Rollout] = {}
        self._parked: dict[str, Rollout] = {}
        self._largest_open = inf  # capacity among replicas that take work; where none does, as it was
        self._in_flight = 0
        self._submitted = self._admitted = self._finished = self._cancelled = 0
        self._requeued = self._moves = self._preemptions = self._stale = 0

    @property
    def rule(self) -> str:
        """The rule's name."""
        return self._rule.name

    # -- replicas -------------------------------------------------------------------------------------------------
    def add_replica(
        self, replica_id: str, kv_capacity_tokens: int, *, max_running: int, block_tokens: int, policy_version: int = 0
    ) -> list[str]:
        """A replica serves from now on; one known by that name is removed first.

        Returns the rollouts that wait again, because the name's former holder had them.
        Raises `ValueError` for a capacity or batch below 1.
        """
        if min(kv_capacity_tokens, max_running, block_tokens) < 1:
            raise ValueError(
                f"replica {replica_id!r}: kv_capacity_tokens {kv_capacity_tokens}, max_running {max_running} and "
                f"block_tokens {block_tokens} must be at least 1"
            )
        lost = self.remove_replica(replica_id) if replica_id in self._fleet.by_id else []
        self._fleet.add(
            replica_id,
            kv_capacity_tokens,
            max_running=max_running,
            block_tokens=block_tokens,
            policy_version=policy_version,
        )
        self._replicas_changed()
        return lost

    def remove_replica(self, replica_id: str) -> list[str]:
        """The replica is gone; its residents wait again, from their last reported turn. Returns their ids."""
        replica = self._replica(replica_id)
        orphans = list(replica.residents.values())
        for rollout in orphans:
            self._leave(rollout, ended=False)
        self._fleet.remove(replica_id)
        self._replicas_changed()
        self._wait_again(orphans)
        return [rollout.load.rollout_id for rollout in orphans]

    def set_serving(self, replica_id: str, serving: bool) -> None:
        """False: nothing new goes there; residents stay."""
        self._replica(replica_id).serving = serving
        self._replicas_changed()

    def set_policy_version(self, policy_version: int) -> None:
        """A new version is published to all; lengths learned under the old one fade."""
        self._rule.new_policy_version()
        for replica in self._fleet.by_id.values():
            replica.policy_version = max(replica.policy_version, policy_version)

    def remember(self, max_response_tokens: int, max_turns: int, ended: Sequence[tuple[str, float, bool]]) -> None:
        """Teach the estimate lengths of an earlier step or run: (group, response tokens, truncated by its budget)."""
        self._rule.remember(max_response_tokens, max_turns, ended)

    def adopt(self, replica_id: str, loads: Iterable[RolloutLoad]) -> list[str]:
        """These run on the replica already: after our own death. Returns those it must stop: another holds them."""
        replica = self._replica(replica_id)
        stop: list[str] = []
        for load in loads:
            rollout = self._rollouts.get(load.rollout_id)
            if rollout is None:
                rollout = self._new(load, 0.0)
                self._rule.submitted([rollout])
            elif rollout.replica is not None:
                if rollout.replica is not replica:
                    stop.append(load.rollout_id)
                continue
            if self._parked.pop(load.rollout_id, None) is None:
                self._rule.unqueue(rollout)
            rollout.load = load
            self._settle(rollout, replica)
        return stop

    # -- rollouts -------------------------------------------------------------------------------------------------
    def submit(self, loads: Sequence[RolloutLoad], *, now_s: float = 0.0) -> None:
        """These wait for a replica; ones known already, or twice in `loads`, are left as they are.

        Raises `NeverFits` before any of them is queued, with the numbers, where one is larger than every replica.
        """
        fresh: dict[str, RolloutLoad] = {}
        for load in loads:
            if load.rollout_id not in self._rollouts:
                fresh.setdefault(load.rollout_id, load)
        largest = self._fleet.largest_capacity_tokens
        if self._fleet.by_id:
            for load in fresh.values():
                needed = self._rule.needed_tokens(load)
                if needed > largest:
                    raise NeverFits(load.rollout_id, needed, largest, self._rule.need)
        self._queue([self._new(load, now_s) for load in fresh.values()])

    def cancel(self, rollout_id: str) -> str | None:
        """The rollout is over, wherever it is. Returns the replica that must stop it, if one runs it."""
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is None:
            self._stale += 1
            return None
        self._cancelled += 1
        replica = rollout.replica
        if replica is None:
            if self._parked.pop(rollout_id, None) is None:
                self._rule.withdrawn(rollout)
            return None
        # A cut life is survived, not ended: it must not teach the estimate that rollouts are short.
        self._leave(rollout, ended=True, truncated=True)
        return replica.replica_id

    def turn_finished(self, replica_id: str, report: TurnReport) -> bool:
        """A turn ended and the rollout goes on; False: the replica does not hold it.

        Lengths that cannot be, here or in `finished`, set the replica aside, and count as far as they can be.
        """
        rollout = self._held(replica_id, report.rollout_id)
        if rollout is None:
            return False
        self._update(rollout, report)
        self._rule.grown(rollout)
        return True

    def finished(self, replica_id: str, end: Finished) -> bool:
        """The rollout ended; False: the replica does not hold it, and its result must not be used."""
        rollout = self._held(replica_id, end.rollout_id)
        if rollout is None:
            return False
        self._update(rollout, end)
        del self._rollouts[end.rollout_id]
        self._finished += 1
        self._leave(rollout, ended=True, truncated=end.truncated)
        return True

    def returned(self, replica_id: str, loads: Sequence[RolloutLoad]) -> list[str]:
        """Handed back between turns: moved, or its engine died. They wait again; returns those accepted."""
        back: list[Rollout] = []
        for load in loads:
            rollout = self._held(replica_id, load.rollout_id)
            if rollout is None:
                continue
            self._fleet.generated_tokens += max(0, load.generated_tokens - rollout.load.generated_tokens)
            rollout.load = load
            if rollout.prefer is not None:
                self._moves += 1
            self._leave(rollout, ended=False)
            back.append(rollout)
        self._wait_again(back)
        return [rollout.load.rollout_id for rollout in back]

    def replica_report(self, replica_id: str, load: ReplicaLoad) -> str | None:
        """What the engine says of itself. Nonsense sets the replica aside; returns why, if it did so now."""
        replica = self._replica(replica_id)
        reason = _nonsense(replica, load)
        if reason is not None:
            first = replica.set_aside is None
            self._set_aside(replica, reason)
            return reason if first else None
        new_preemptions = load.preemptions - replica.load.preemptions
        self._preemptions += new_preemptions
        replica.load = load
        replica.policy_version = replica.told_version = load.policy_version
        replica.admitted_since_report = 0
        if load.steps:
            told = replica.decode_step - load.steps
            replica.clock_offset = told if replica.clock_offset is None else max(replica.clock_offset, told)
            replica.decode_step = max(replica.decode_step, replica.clock_offset + load.steps)
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
            self._settle(rollout, replica)
            self._admitted += 1
            replica.admissions += 1
            replica.admitted_since_report += 1
            admissions.append(Admission(rollout.load.rollout_id, replica.replica_id))
        moves: Sequence[Move] = self._rule.moves()
        return Decisions(tuple(admissions), tuple(moves))

    # -- what is known --------------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        """Rollouts resident on some replica."""
        return self._in_flight

    def load_of(self, rollout_id: str) -> RolloutLoad | None:
        rollout = self._rollouts.get(rollout_id)
        return None if rollout is None else rollout.load

    def replica_of(self, rollout_id: str) -> str | None:
        rollout = self._rollouts.get(rollout_id)
        return rollout.replica.replica_id if rollout is not None and rollout.replica is not None else None

    def residents(self, replica_id: str) -> list[str]:
        return list(self._replica(replica_id).residents)

    def knows(self, replica_id: str) -> bool:
        return replica_id in self._fleet.by_id

    def reserved_tokens(self, replica_id: str) -> int:
        return self._replica(replica_id).reserved_tokens

    def snapshot(self) -> BalancerSnapshot:
        return BalancerSnapshot(
            rule=self._rule.name,
            waiting=len(self._rollouts) - self._in_flight,
            in_flight=self._in_flight,
            submitted=self._submitted,
            admitted=self._admitted,
            finished=self._finished,
            cancelled=self._cancelled,
            requeued=self._requeued,
            moves=self._moves,
            preemptions=self._preemptions,
            stale_reports=self._stale,
            too_large=tuple(self._parked),
            replicas=tuple(replica.snapshot() for replica in self._fleet.by_id.values()),
        )

    # -- books ----------------------------------------------------------------------------------------------------
    def _replica(self, replica_id: str) -> Replica:
        replica = self._fleet.by_id.get(replica_id)
        if replica is None:
            raise UnknownReplica(f"replica {replica_id!r} is not registered; register it with what is resident")
        return replica

    def _held(self, replica_id: str, rollout_id: str) -> Rollout | None:
        rollout = self._rollouts.get(rollout_id)
        if rollout is None or rollout.replica is None or rollout.replica.replica_id != replica_id:
            self._stale += 1
            return None
        return rollout

    def _new(self, load: RolloutLoad, now_s: float) -> Rollout:
        rollout = Rollout(load, self._submitted, submitted_s=now_s)
        self._rollouts[load.rollout_id] = rollout
        self._submitted += 1
        return rollout

    def _settle(self, rollout: Rollout, replica: Replica) -> None:
        rollout.replica = replica
        rollout.step_seen = replica.decode_step
        replica.residents[rollout.load.rollout_id] = rollout
        group_id = rollout.load.group_id
        replica.groups[group_id] = replica.groups.get(group_id, 0) + 1
        self._in_flight += 1
        self._rule.admitted(rollout)

    def _leave(self, rollout: Rollout, *, ended: bool, truncated: bool = False) -> None:
        replica = rollout.replica
        assert replica is not None
        del replica.residents[rollout.load.rollout_id]
        group_id = rollout.load.group_id
        replica.groups[group_id] -= 1
        if replica.groups[group_id] == 0:
            del replica.groups[group_id]
        self._in_flight -= 1
        self._rule.released(rollout, ended=ended, truncated=truncated)
        rollout.replica = None

    def _wait_again(self, rollouts: Sequence[Rollout]) -> None:
        self._requeued += len(rollouts)
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
        self._parked[rollout.load.rollout_id] = rollout
        self._rule.withdrawn(rollout)

    def _replicas_changed(self) -> None:
        """Tell the rule, and park or queue again what the largest replica that takes work now can not or can hold."""
        self._rule.replicas_changed()
        before = self._largest_open
        self._largest_open = max((r.kv_capacity_tokens for r in self._fleet.open()), default=before)
        if self._largest_open > before:
            parked, self._parked = self._parked, {}
            self._queue(list(parked.values()))
        elif self._largest_open < before:
            for rollout in self._rollouts.values():
                waits = rollout.replica is None and rollout.load.rollout_id not in self._parked
                if waits and self._rule.needed_tokens(rollout.load) > self._largest_open:
                    self._park(rollout)

    def _update(self, rollout: Rollout, report: TurnReport | Finished) -> None:
        """Note the new lengths, and how far the replica's decode clock must have come."""
        replica, load = rollout.replica, rollout.load
        assert replica is not None
        reason = _impossible(load, report)
        if reason is not None:
            self._set_aside(replica, reason)
        generated = min(max(report.generated_tokens, load.generated_tokens), load.max_response_tokens)
        fresh = generated - load.generated_tokens
        self._fleet.generated_tokens += fresh
        replica.decode_step = max(replica.decode_step, rollout.step_seen + fresh)
        rollout.step_seen = replica.decode_step
        rollout.load = RolloutLoad(
            rollout_id=load.rollout_id,
            group_id=load.group_id,
            prompt_tokens=load.prompt_tokens,
            max_response_tokens=load.max_response_tokens,
            max_turns=load.max_turns,
            context_tokens=min(max(report.context_tokens, load.context_tokens), load.worst_case_tokens),
            generated_tokens=generated,
            turn=max(report.turn, load.turn),
        )


def _nonsense(replica: Replica, load: ReplicaLoad) -> str | None:
    """Why this report cannot be true, or None."""
    if not 0 <= load.kv_used_tokens <= replica.kv_capacity_tokens:  # refuses NaN as well
        return f"reports {load.kv_used_tokens} KV tokens in use of {replica.kv_capacity_tokens}"
    if min(load.running, load.waiting) < 0:
        return f"reports a negative count: {load}"
    if load.policy_version < replica.told_version:
        return f"reports policy version {load.policy_version} after {replica.told_version}"
    if load.steps < replica.load.steps:
        return f"reports {load.steps} steps after {replica.load.steps}"
    if load.preemptions < replica.load.preemptions:
        return f"reports {load.preemptions} preemptions after {replica.load.preemptions}"
    return None


def _impossible(load: RolloutLoad, report: TurnReport | Finished) -> str | None:
    """Why a rollout with this load cannot have come to the lengths reported, or None."""
    if report.context_tokens > load.worst_case_tokens:
        most = load.worst_case_tokens
        return f"reports {report.context_tokens} tokens of rollout {load.rollout_id!r}, of at most {most}"
    if report.generated_tokens > load.max_response_tokens:
        return (
            f"reports {report.generated_tokens} generated tokens of rollout {load.rollout_id!r}, "
            f"of at most {load.max_response_tokens}"
        )
    if min(report.context_tokens, report.generated_tokens, report.turn) < 0:
        return f"reports a negative count: {report}"
    return None
