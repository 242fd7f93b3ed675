"""Placement rules behind one interface, so that they can be compared.

A rule reads the state of replicas and rollouts, never a rollout's future, and is asked for one admission at a time.
`worst_case` and `expected_kv` hold rollouts back until they fit; the others hand them out at once, as routers do, and
leave queueing and eviction to the engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from zlib import crc32

from scheduler.records import Move, RolloutLoad
from scheduler.state import Replica, Rollout, State


class Change(Enum):
    """An event in a rollout's life."""

    QUEUED = auto()  # new, or back from a replica
    ADMITTED = auto()  # to `rollout.replica`
    TURN_ENDED = auto()  # `rollout.load` has the new lengths
    REQUEUED = auto()  # it leaves `rollout.replica`, to wait again
    ENDED = auto()  # it leaves `rollout.replica` for good, by its policy's choice
    CUT = auto()  # the same, cut by its budget or cancelled: it might have become longer
    WITHDRAWN = auto()  # it waits no longer: cancelled, or parked

    @property
    def leaves(self) -> bool:
        return self in (Change.REQUEUED, Change.ENDED, Change.CUT)


class PlacementRule(ABC):
    """The interface of a placement rule; only `pick` must be defined."""

    name = ""
    need = "its context and one more"  # what `needed_tokens` counts, in words

    def __init__(self, state: State) -> None:
        self.state = state

    @abstractmethod
    def pick(self) -> tuple[Rollout, Replica] | None:
        """The next admission, with `rollout.why` set; None: nothing may start now."""

    def moves(self) -> Sequence[Move]:
        """Rollouts that leave their replica at their next turn boundary."""
        return ()

    def needed_tokens(self, load: RolloutLoad) -> int:
        """The least capacity of a replica that could ever hold the rollout."""
        return load.least_tokens

    def reserved_tokens(self, replica: Replica) -> int:
        """KV that its residents are expected to need, now or later; 0 where the rule does not look ahead."""
        return replica.reserved_tokens

    def rollout_changed(self, rollout: Rollout, change: Change) -> None:  # noqa: B027
        """Called after every change of a rollout."""

    def replicas_changed(self) -> None:  # noqa: B027
        """Replicas were added, removed, opened or closed."""

    def replica_reported(self, replica: Replica, new_preemptions: int) -> None:  # noqa: B027
        """Called after an engine's report is stored."""


class FirstComeFirstServed(PlacementRule):
    """Places the oldest rollout of the queue; a subclass chooses the replica."""

    why = ""

    @abstractmethod
    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        """The chosen replica, of those that are open and could ever hold the rollout; None: it waits, and so do
        those behind it.
        """

    def pick(self) -> tuple[Rollout, Replica] | None:
        rollout = next(iter(self.state.queue.values()), None)
        if rollout is None:
            return None
        needed = self.needed_tokens(rollout.load)
        replicas = [replica for replica in self.state.open() if replica.kv_capacity_tokens >= needed]
        replica = self.choose(rollout, replicas) if replicas else None
        if replica is None:
            return None
        rollout.why = self.why
        return rollout, replica


class Static(FirstComeFirstServed):
    """Each batch of submissions is cut into equal runs, one per replica, before anything starts."""

    name = "static"
    why = "its place in the batch: equal shares, cut up front"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        place, size = rollout.batch
        return replicas[place * len(replicas) // size]


class RoundRobin(FirstComeFirstServed):
    """Replicas in turn."""

    name = "round_robin"
    why = "the next in turn"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        return replicas[self.state.admitted % len(replicas)]


class ConsistentHash(FirstComeFirstServed):
    """The replica with the highest hash of (rollout, replica): few rollouts move when replicas come or go."""

    name = "consistent_hash"
    why = "the highest hash with the rollout's id"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        key = crc32(rollout.load.rollout_id.encode())
        return max(replicas, key=lambda replica: _mixed(key ^ crc32(replica.replica_id.encode())))


def _mixed(value: int) -> int:
    """MurmurHash3's finaliser: crc32 alone is linear, and would favour some replicas."""
    value = (value ^ value >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    value = (value ^ value >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


class LeastRequests(FirstComeFirstServed):
    """The replica whose engine has the fewest requests, by its last report and later admissions; the rollout
    stays there.
    """

    name = "least_requests"
    why = "the fewest requests in its engine"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        return min(replicas, key=lambda r: r.load.running + r.load.waiting + r.admitted_since_report)


class LeastSessions(FirstComeFirstServed):
    """The replica with the fewest live rollouts, at a tool or not; the rollout stays there."""

    name = "least_sessions"
    why = "the fewest rollouts live there"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        return min(replicas, key=lambda replica: len(replica.residents))


class PrefixAware(FirstComeFirstServed):
    """The replica where the prompt is cached, unless it is well ahead of the idlest one; then the idlest."""

    name = "prefix_aware"
    imbalance_rollouts = 32
    imbalance_ratio = 1.1

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        idlest = min(replicas, key=lambda replica: len(replica.residents))
        group = rollout.load.group_id
        cached = max(replicas, key=lambda replica: replica.groups.get(group, 0))
        ahead = len(cached.residents) - len(idlest.residents) > self.imbalance_rollouts
        if (
            ahead and len(cached.residents) > self.imbalance_ratio * len(idlest.residents)
        ) or group not in cached.groups:
            self.why = "the fewest rollouts live there, and no better place has its prompt"
            return idlest
        self.why = "the prompt is cached there"
        return cached


class WorstCase(FirstComeFirstServed):
    """Reserve prompt and maximum response for a rollout's whole life, on the freest replica; wait where none has room.

    What the authors of arXiv:2508.20722 describe (section 3.2). Never overflows, and leaves most of the cache unused.
    """

    name = "worst_case"
    need = "its prompt and the longest response it may have, in whole blocks"
    why = "most KV that nobody has reserved"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        def free(replica: Replica) -> int:
            return replica.kv_capacity_tokens - replica.reserved_tokens

        freest = max((replica for replica in replicas if replica.has_seat), key=free, default=None)
        return freest if freest is not None and free(freest) >= self.needed_tokens(rollout.load) else None

    def rollout_changed(self, rollout: Rollout, change: Change) -> None:
        if change is Change.ADMITTED or change.leaves:
            assert rollout.replica is not None
            tokens = self.needed_tokens(rollout.load) if change is Change.ADMITTED else 0
            rollout.replica.reserved_tokens += tokens - rollout.reserved_tokens
            rollout.reserved_tokens = tokens

    def needed_tokens(self, load: RolloutLoad) -> int:
        """Whole blocks: an engine never allocates half a block."""
        return self.state.whole_blocks(load.worst_case_tokens)
