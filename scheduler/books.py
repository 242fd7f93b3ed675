"""The balancer's books: every rollout and replica it knows, and what has been counted. No rule reads or writes them."""

from collections.abc import Sequence

from rstar_ray.trajectory import Placement
from scheduler.fleet import Fleet, Replica, Rollout
from scheduler.records import BalancerSnapshot, Finished, ReplicaLoad, RolloutLoad, TurnReport, UnknownReplica
from scheduler.waits import Held


class Books:
    """Who is where. Every rollout is in exactly one place: waiting, or resident on one replica."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.rollouts: dict[str, Rollout] = {}
        self.parked: dict[str, Rollout] = {}  # waiting, and larger than every replica that takes work
        self.in_flight = 0
        self.submitted = self.admitted = self.finished = self.cancelled = 0
        self.requeued = self.moves = self.preemptions = self.recomputed_tokens = self.stale = 0

    def replica(self, replica_id: str) -> Replica:
        """Raises `UnknownReplica`."""
        replica = self.fleet.by_id.get(replica_id)
        if replica is None:
            raise UnknownReplica(f"replica {replica_id!r} is not registered; register it with what is resident")
        return replica

    def held(self, replica_id: str, rollout_id: str) -> Rollout | None:
        """None, and counted as stale, where that replica does not hold it (any more)."""
        rollout = self.rollouts.get(rollout_id)
        if rollout is None or rollout.replica is None or rollout.replica.replica_id != replica_id:
            self.stale += 1
            return None
        return rollout

    def new(self, load: RolloutLoad) -> Rollout:
        rollout = Rollout(load, self.submitted)
        self.rollouts[load.rollout_id] = rollout
        self.submitted += 1
        return rollout

    def settle(self, rollout: Rollout, replica: Replica) -> None:
        """The rollout is resident there from now on."""
        rollout.replica, rollout.leaving = replica, False
        rollout.step_seen = replica.decode_step
        replica.residents[rollout.load.rollout_id] = rollout
        group_id = rollout.load.group_id
        replica.groups[group_id] = replica.groups.get(group_id, 0) + 1
        self.in_flight += 1

    def leave(self, rollout: Rollout) -> None:
        """It is not resident any more; `rollout.replica` is cleared once the rule has been told, too."""
        replica = rollout.replica
        assert replica is not None
        del replica.residents[rollout.load.rollout_id]
        group_id = rollout.load.group_id
        replica.groups[group_id] -= 1
        if replica.groups[group_id] == 0:
            del replica.groups[group_id]
        self.in_flight -= 1

    def held_up(self) -> Held | None:
        """What keeps the next in line from a replica once all has been decided; None where nobody waits."""
        if len(self.rollouts) == self.in_flight:
            return None
        takers = self.fleet.open()
        if not takers:
            return Held.REPLICA
        return Held.ROOM if any(replica.has_seat for replica in takers) else Held.SEAT

    def placement(self, rollout_id: str, expected_tokens: int) -> Placement:
        """Why the rollout is where it is, and how full it is there; the waits are known to whoever has a clock."""
        rollout = self.rollouts[rollout_id]
        replica = rollout.replica
        assert replica is not None
        return Placement(
            replica_id=replica.replica_id,
            turn=rollout.load.turn,
            why=rollout.why,
            kv_used_tokens=replica.load.kv_used_tokens,
            kv_expected_tokens=expected_tokens,
            kv_capacity_tokens=replica.kv_capacity_tokens,
            residents=len(replica.residents),
        )

    def hand_back(self, rollout: Rollout) -> None:
        """It goes on elsewhere, from where it is: its context is computed again there."""
        self.requeued += 1
        self.recomputed_tokens += rollout.load.context_tokens

    def preempted(self, replica: Replica, times: int) -> None:
        """An engine computes again what it preempted; how much, it does not tell: the mean context there is counted."""
        self.preemptions += times
        if times and replica.residents:
            contexts = sum(rollout.load.context_tokens for rollout in replica.residents.values())
            self.recomputed_tokens += times * contexts // len(replica.residents)

    def update(self, rollout: Rollout, report: TurnReport | Finished) -> str | None:
        """Note the new lengths, and how far the replica's decode clock must have come.

        Returns why they cannot be, or None; then they count as far as they can be.
        """
        replica, load = rollout.replica, rollout.load
        assert replica is not None
        generated = min(max(report.generated_tokens, load.generated_tokens), load.max_response_tokens)
        fresh = generated - load.generated_tokens
        self.fleet.generated_tokens += fresh
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
        return _impossible(load, report)

    def snapshot(self, rule: str, risk: float, reserved_tokens: Sequence[int]) -> BalancerSnapshot:
        """`reserved_tokens`: of every replica, in the fleet's order."""
        replicas = zip(self.fleet.by_id.values(), reserved_tokens, strict=True)
        return BalancerSnapshot(
            rule=rule,
            waiting=len(self.rollouts) - self.in_flight,
            in_flight=self.in_flight,
            submitted=self.submitted,
            admitted=self.admitted,
            finished=self.finished,
            cancelled=self.cancelled,
            requeued=self.requeued,
            moves=self.moves,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            stale_reports=self.stale,
            risk=risk,
            too_large=tuple(self.parked),
            replicas=tuple(replica.snapshot(reserved) for replica, reserved in replicas),
        )

    def faults(self) -> list[str]:
        """What is not back to zero although nothing waits and nothing is in flight; the counters that disagree."""
        found: list[str] = []
        ended = self.finished + self.cancelled
        if self.submitted != ended:
            found.append(f"{self.submitted} submitted, but {ended} finished or cancelled")
        if self.parked:
            found.append(f"{len(self.parked)} rollouts still parked")
        for replica in self.fleet.by_id.values():
            for what, left in (
                ("residents", len(replica.residents)),
                ("prompt groups", len(replica.groups)),
                ("reserved tokens", replica.reserved_tokens),
            ):
                if left:
                    found.append(f"{replica.replica_id} is left with {left} {what}")
        return found


def nonsense(replica: Replica, load: ReplicaLoad) -> str | None:
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
