"""Placement rules with one interface, so that they can be compared.

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

    QUEUED = auto()  # new, or returned by a replica
    ADMITTED = auto()  # placed on `rollout.replica`
    TURN_ENDED = auto()  # `rollout.load` has the new lengths
    REQUEUED = auto()  # left `rollout.replica`, and waits again
    ENDED = auto()  # ended on `rollout.replica` by the policy
    CUT = auto()  # ended by its budget or cancelled; it could have become longer
    WITHDRAWN = auto()  # left the queue: cancelled, or parked

    @property
    def leaves(self) -> bool:
        return self in (Change.REQUEUED, Change.ENDED, Change.CUT)


class PlacementRule(ABC):
    """The interface of a placement rule; only `pick` must be defined."""

    name = ""
    need = "its context and one more"  # description of `needed_tokens` for messages

    def __init__(self, state: State) -> None:
        self.state = state

    @abstractmethod
    def pick(self) -> tuple[Rollout, Replica] | None:
        """The next admission, with `rollout.why` set; None if no rollout can start now."""

    def moves(self) -> Sequence[Move]:
        """Rollouts that should leave their replica at their next turn boundary."""
        return ()

    def needed_tokens(self, load: RolloutLoad) -> int:
        """The least KV capacity of a replica that can hold the rollout."""
        return load.least_tokens

    def reserved_tokens(self, replica: Replica) -> int:
        """KV that the residents are expected to need, now or later; 0 if the rule does not estimate it."""
        return replica.reserved_tokens

    def rollout_changed(self, rollout: Rollout, change: Change) -> None:  # noqa: B027
        """Called after every change of a rollout."""

    def replicas_changed(self) -> None:  # noqa: B027
        """Replicas were added, removed, opened or closed."""

    def replica_reported(self, replica: Replica, new_preemptions: int) -> None:  # noqa: B027
        """Called after an engine's report is stored."""


class FirstComeFirstServed(PlacementRule):
    """Places the first rollout of the queue; a subclass chooses the replica."""

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
    """Divides each batch of submissions into equal consecutive parts, one per replica."""

    name = "static"
    why = "its place in the batch: equal shares, cut up front"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        place, size = rollout.batch
        return replicas[place * len(replicas) // size]


class RoundRobin(FirstComeFirstServed):
    """Round-robin over the replicas."""

    name = "round_robin"
    why = "the next in turn"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        return replicas[self.state.admitted % len(replicas)]


class ConsistentHash(FirstComeFirstServed):
    """The replica with the highest hash of (rollout, replica): few rollouts move if replicas are added or removed."""

    name = "consistent_hash"
    why = "the highest hash with the rollout's id"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        key = crc32(rollout.load.rollout_id.encode())
        return max(replicas, key=lambda replica: _mixed(key ^ crc32(replica.replica_id.encode())))


def _mixed(value: int) -> int:
    """MurmurHash3's finaliser, because crc32 alone is linear and favours some replicas."""
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
    """The replica with the fewest live rollouts, including those at tools; the rollout stays there."""

    name = "least_sessions"
    why = "the fewest rollouts live there"

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        return min(replicas, key=lambda replica: len(replica.residents))


class PrefixAware(FirstComeFirstServed):
    """The replica where the prompt is cached, unless it has many more rollouts than the least loaded one."""

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
    """Reserve prompt and maximum response for a rollout's life, on the replica with most room; wait if none has room.

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
        """Rounded up to whole blocks, as the engine allocates them."""
        return self.state.whole_blocks(load.worst_case_tokens)
