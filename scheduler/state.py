"""The balancer's state: every rollout and replica it knows, the queue, and counters. Owned by one `Balancer`.

Every rollout is in exactly one place: resident on one replica, or waiting. One that waits is in the queue, or parked
where no replica that takes work could ever hold it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from math import inf
from typing import Any

from rstar_ray.config import EngineConfig
from rstar_ray.trajectory import Placement
from scheduler.cost import EngineCost
from scheduler.records import (
    BalancerSnapshot,
    Counters,
    Registration,
    ReplicaLoad,
    ReplicaSnapshot,
    RolloutLoad,
    TurnReport,
    UnknownReplica,
)

BLOCK_TOKENS = EngineConfig().block_size
"""Default of the engines, used while no replica is registered."""
MAX_ENDED = 65_536
"""Latest ends that are remembered; a rollout whose end is forgotten may be judged twice."""


class QueueBlock(StrEnum):
    """Why the first rollout of the queue is on no replica."""

    REPLICA = "no replica takes work"
    SEAT = "every replica holds as many rollouts as it may"
    ROOM = "no replica has room in its KV cache for the next in line"


@dataclass(slots=True, eq=False)
class Rollout:
    """One live rollout: its last report, and its place."""

    load: RolloutLoad
    known_since_s: float
    payload: Any = None  # data for the worker, opaque here
    has_payload: bool = False  # False: a replica registered with it, and it was not submitted
    replica: "Replica | None" = None  # None: waiting
    waiting_since_s: float = 0.0
    blocked_before_s: dict[QueueBlock, float] = field(default_factory=dict[QueueBlock, float])  # totals at its start
    batch: tuple[int, int] = (0, 1)  # its position in its batch of queued rollouts, and the batch's size
    step_seen: float = 0.0  # the replica's decode clock when `load` was reported, plus its time at tools
    leaving: bool = False  # will be handed back at its next turn boundary
    prefer: str | None = None  # a move's target, tried first
    why: str = ""  # the rule's reason for its replica, or for its move
    reserved_tokens: int = 0  # reserved by the rule
    profile_row: int = -1  # the rule's index of it on its replica
    length_row: int = -1  # the estimate's index of it

    def sampled_at(self, decode_step: float) -> float:
        """Sampled tokens at this step of its replica: those last reported, and one per step since."""
        return min(self.load.generated_tokens + decode_step - self.step_seen, self.load.max_response_tokens - 1)

    def response_at(self, decode_step: float) -> float:
        """Like `sampled_at`, for all tokens after the prompt."""
        return min(self.load.response_tokens + decode_step - self.step_seen, self.load.max_response_tokens - 1)


@dataclass(slots=True, eq=False)
class Replica:
    """One engine: its capacity, its last report, and its residents."""

    replica_id: str
    index: int  # position in `State.by_index`
    kv_capacity_tokens: int
    max_running: int
    block_tokens: int = BLOCK_TOKENS
    cost: EngineCost | None = None  # None: not measured
    serving: bool = True
    quarantine: str | None = None  # why it gets no more work
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    residents: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    groups: dict[str, int] = field(default_factory=dict[str, int])  # residents per prompt group
    reserved_tokens: int = 0
    admitted_since_report: int = 0
    decode_step: float = 0.0  # tokens by which each running rollout has grown since the start, according to reports
    clock_offset: float | None = None  # decode step minus the engine's count of steps, if it reports one

    @property
    def open(self) -> bool:
        return self.serving and self.quarantine is None

    @property
    def has_seat(self) -> bool:
        return len(self.residents) < self.max_running

    def update(self, load: ReplicaLoad) -> None:
        """Store a possible report."""
        self._advance_decode_step(load)
        self.load = load
        self.admitted_since_report = 0

    def _advance_decode_step(self, load: ReplicaLoad) -> None:
        """Advance the decode clock by the engine's count of steps, except for rollouts at a tool."""
        if not load.steps:
            return
        before, offset = self.decode_step, self.decode_step - load.steps
        self.clock_offset = offset if self.clock_offset is None else max(self.clock_offset, offset)
        self.decode_step = max(self.decode_step, self.clock_offset + load.steps)
        for rollout_id in set(self.load.at_tools).intersection(load.at_tools):  # at a tool since the last report
            if (rollout := self.residents.get(rollout_id)) is not None:
                rollout.step_seen = min(rollout.step_seen + self.decode_step - before, self.decode_step)

    def whole_blocks(self, tokens: int) -> int:
        """Tokens rounded up to whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def snapshot(self, reserved_tokens: int) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            replica_id=self.replica_id,
            kv_capacity_tokens=self.kv_capacity_tokens,
            kv_used_tokens=self.load.kv_used_tokens,
            kv_reserved_tokens=reserved_tokens,
            in_flight=len(self.residents),
            quarantine=self.quarantine,
        )


class State(Counters):
    """All replicas and rollouts, the queue, and the counters."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas: dict[str, Replica] = {}
        self.by_index: list[Replica | None] = []  # a stable order; None: a removed replica
        self.block_tokens = BLOCK_TOKENS  # the largest of any replica
        self.rollouts: dict[str, Rollout] = {}
        self.queue: OrderedDict[str, Rollout] = OrderedDict()
        self.parked: dict[str, Rollout] = {}
        self.ended: OrderedDict[str, str] = OrderedDict()  # replica by rollout, of the latest ends
        self.largest_open_tokens = inf  # capacity among open replicas; unchanged while there are none
        self.generated_tokens = 0  # reported for all rollouts

    # -- replicas -------------------------------------------------------------------------------------------------
    def replica(self, replica_id: str) -> Replica:
        """Raises `UnknownReplica`."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            raise UnknownReplica(f"replica {replica_id!r} is not registered; register it with what is resident")
        return replica

    def add_replica(self, registered: Registration) -> Replica:
        index = self.by_index.index(None) if None in self.by_index else len(self.by_index)
        replica = Replica(
            registered.replica_id,
            index,
            registered.kv_capacity_tokens,
            registered.max_running,
            registered.block_tokens,
            cost=registered.cost,
            load=ReplicaLoad(preemptions=registered.preemptions),
        )
        self.replicas[registered.replica_id] = replica
        self.block_tokens = max(known.block_tokens for known in self.replicas.values())
        self.by_index[index : index + 1] = [replica]
        return replica

    def remove_replica(self, replica_id: str) -> None:
        self.by_index[self.replicas.pop(replica_id).index] = None
        for rollout_id in [name for name, replica in self.ended.items() if replica == replica_id]:
            del self.ended[rollout_id]

    def open(self) -> list[Replica]:
        """The replicas that accept work."""
        return [replica for replica in self.by_index if replica is not None and replica.open]

    def whole_blocks(self, tokens: int) -> int:
        """Like `Replica.whole_blocks`, before the replica is known."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    # -- rollouts -------------------------------------------------------------------------------------------------
    def held(self, replica_id: str, rollout_id: str) -> Rollout | None:
        """The rollout; None, counted as a stale report, if this replica does not hold it."""
        rollout = self.rollouts.get(rollout_id)
        if rollout is None or rollout.replica is None or rollout.replica.replica_id != replica_id:
            self.stale_reports += 1
            return None
        return rollout

    def add_rollout(self, load: RolloutLoad, now_s: float) -> Rollout:
        rollout = self.rollouts[load.rollout_id] = Rollout(load, now_s)
        self.submitted += 1
        self.ended.pop(load.rollout_id, None)
        return rollout

    def end_rollout(self, rollout_id: str, replica_id: str) -> None:
        """Remove a finished rollout; remember its replica, which still judges it or holds its result for the driver."""
        del self.rollouts[rollout_id]
        self.finished += 1
        self.ended[rollout_id] = replica_id
        if len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def settle(self, rollout: Rollout, replica: Replica) -> None:
        """Make the rollout a resident of the replica."""
        self.queue.pop(rollout.load.rollout_id, None)
        self.parked.pop(rollout.load.rollout_id, None)
        rollout.replica, rollout.leaving = replica, False
        rollout.step_seen = replica.decode_step
        replica.residents[rollout.load.rollout_id] = rollout
        group_id = rollout.load.group_id
        replica.groups[group_id] = replica.groups.get(group_id, 0) + 1
        self.in_flight += 1

    def leave(self, rollout: Rollout) -> None:
        """Remove a resident; the caller clears `rollout.replica` after it has notified the rule."""
        replica = rollout.replica
        assert replica is not None
        del replica.residents[rollout.load.rollout_id]
        group_id = rollout.load.group_id
        replica.groups[group_id] -= 1
        if replica.groups[group_id] == 0:
            del replica.groups[group_id]
        self.in_flight -= 1

    def count_preemptions(self, replica: Replica, times: int) -> None:
        """Count preemptions; the recomputed length, which is not reported, is estimated by the residents' mean."""
        self.preemptions += times
        if times and replica.residents:
            contexts = sum(rollout.load.context_tokens for rollout in replica.residents.values())
            self.recomputed_tokens += times * contexts // len(replica.residents)

    def update_lengths(self, rollout: Rollout, report: TurnReport) -> None:
        """Store the new lengths, clamped to possible values, and advance the decode clock accordingly."""
        replica, load = rollout.replica, rollout.load
        assert replica is not None
        generated = min(max(report.generated_tokens, load.generated_tokens), load.max_response_tokens)
        fresh = generated - load.generated_tokens
        self.generated_tokens += fresh
        replica.decode_step = max(replica.decode_step, rollout.step_seen + fresh)
        rollout.step_seen = replica.decode_step
        rollout.load = replace(
            load,
            context_tokens=min(max(report.context_tokens, load.context_tokens), load.worst_case_tokens),
            generated_tokens=generated,
            turn=max(report.turn, load.turn),
        )

    # -- reports --------------------------------------------------------------------------------------------------
    def queue_block(self) -> QueueBlock | None:
        """Why rollouts still wait after a decision; None if no rollout waits."""
        if len(self.rollouts) == self.in_flight:
            return None
        replicas = self.open()
        if not replicas:
            return QueueBlock.REPLICA
        return QueueBlock.ROOM if any(replica.has_seat for replica in replicas) else QueueBlock.SEAT

    def placement(
        self, rollout: Rollout, expected_tokens: int, waited_s: float, blocked_s: dict[str, float]
    ) -> Placement:
        """The reason for the rollout's replica, and the replica's load."""
        replica = rollout.replica
        assert replica is not None
        return Placement(
            replica_id=replica.replica_id,
            turn=rollout.load.turn,
            why=rollout.why,
            waited_s=waited_s,
            held_s=blocked_s,
            kv_used_tokens=replica.load.kv_used_tokens,
            kv_expected_tokens=expected_tokens,
            kv_capacity_tokens=replica.kv_capacity_tokens,
            residents=len(replica.residents),
        )

    def snapshot(self, rule: str, risk: float, reserved_tokens: Sequence[int]) -> BalancerSnapshot:
        """`reserved_tokens`: by replica, in the order of `replicas`."""
        replicas = zip(self.replicas.values(), reserved_tokens, strict=True)
        return BalancerSnapshot(
            rule=rule,
            waiting=len(self.rollouts) - self.in_flight,
            **{counter.name: getattr(self, counter.name) for counter in fields(Counters)},
            risk=risk,
            too_large=tuple(self.parked),
            replicas=tuple(replica.snapshot(reserved) for replica, reserved in replicas),
        )

    def miscounted(self) -> list[str]:
        """Inconsistent counters."""
        ended, live = self.finished + self.cancelled, len(self.rollouts)
        if self.submitted == ended + live:
            return []
        return [
            f"{self.submitted} submitted, but {ended} finished or cancelled" + (f" and {live} live" if live else "")
        ]

    def leaks(self) -> list[str]:
        """Inconsistent counters, and remaining entries when no rollout is live."""
        found = self.miscounted()
        for where, rollouts in (("queued", self.queue), ("parked", self.parked)):
            if rollouts:
                found.append(f"{len(rollouts)} rollouts still {where}")
        for replica in self.replicas.values():
            for what, left in (
                ("residents", len(replica.residents)),
                ("prompt groups", len(replica.groups)),
                ("reserved tokens", replica.reserved_tokens),
            ):
                if left:
                    found.append(f"{replica.replica_id} is left with {left} {what}")
        return found
