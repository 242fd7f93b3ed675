"""Where a rollout runs: every rule behind one interface, so that they can be compared.

A rule is told of every change and asked for one admission at a time until it has none. It sees reports only, never
a rollout's future. `worst_case` and `expected_kv` hold rollouts back until they fit; the others hand them out at once,
as routers do, and leave queueing and eviction to the engine.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

from scheduler.fleet import Fleet, Replica, Rollout
from scheduler.learned import Learned
from scheduler.records import Move, RolloutLoad


class PlacementRule(Protocol):
    """The balancer calls these; a rollout's `replica` is set before `admitted` and cleared after `released`."""

    name: str
    need: str  # what `needed_tokens` counts, in words
    why: str  # why what was picked last goes where it goes

    def submitted(self, rollouts: Sequence[Rollout]) -> None:
        """These wait now: new ones, or ones that lost their replica."""
        ...

    def unqueue(self, rollout: Rollout) -> None:
        """No longer waiting: it runs already, somewhere."""
        ...

    def withdrawn(self, rollout: Rollout) -> None:
        """Neither waiting nor running: cancelled, or too large for every replica there is. It may be unknown."""
        ...

    def pick(self) -> tuple[Rollout, Replica] | None:
        """The next admission; None: nothing may start now."""
        ...

    def admitted(self, rollout: Rollout) -> None: ...

    def grown(self, rollout: Rollout) -> None:
        """A turn ended; `rollout.load` has the new lengths."""
        ...

    def released(self, rollout: Rollout, *, ended: bool, truncated: bool) -> None:
        """It leaves its replica: for good (`ended`), or to wait again."""
        ...

    def replicas_changed(self) -> None: ...

    def reported(self, replica: Replica, new_preemptions: int) -> None:
        """An engine's own report has been noted."""
        ...

    def moves(self) -> Sequence[Move]: ...

    def needed_tokens(self, load: RolloutLoad) -> int:
        """The least capacity of a replica that could ever hold it."""
        ...

    def reserved_tokens(self, replica: Replica) -> int:
        """KV that its residents are counted on to need, now or later; 0 where the rule does not look ahead."""
        ...

    @property
    def risk(self) -> float:
        """Share of rollouts that it lets an engine preempt; 0 where it does not ask."""
        ...

    def leftovers(self) -> list[str]:
        """What it still keeps of rollouts, in words, although none is left."""
        ...

    def new_policy_version(self) -> None:
        """The weights changed."""
        ...

    def remember(
        self, max_response_tokens: int, max_turns: int, ended: Sequence[tuple[str, float, bool]], *, growth: float
    ) -> None:
        """Lengths of an earlier step or run: (group, sampled tokens, truncated), and response tokens for each."""
        ...

    def learned(self) -> Learned | None:
        """What outlives a step, as it is now; None where the rule learns nothing."""
        ...

    def know_again(self, learned: Learned) -> None:
        """From now on it has learned this, and of budgets that are not named in it what it had."""
        ...


class QueueRule:
    """First come, first served; a subclass says where in `choose`."""

    name = ""
    need = "its context and one more"
    why = ""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.waiting: OrderedDict[str, Rollout] = OrderedDict()

    def submitted(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.waiting[rollout.load.rollout_id] = rollout

    def unqueue(self, rollout: Rollout) -> None:
        self.waiting.pop(rollout.load.rollout_id, None)

    def withdrawn(self, rollout: Rollout) -> None:
        self.unqueue(rollout)

    def pick(self) -> tuple[Rollout, Replica] | None:
        if not self.waiting:
            return None
        rollout = next(iter(self.waiting.values()))  # some replica could hold it: others wait only until that has room
        replica = self.choose(rollout)
        if replica is None:
            return None
        del self.waiting[rollout.load.rollout_id]
        return rollout, replica

    def choose(self, rollout: Rollout) -> Replica | None:
        raise NotImplementedError

    def candidates(self, rollout: Rollout) -> list[Replica]:
        """Open replicas that could ever hold it."""
        needed = self.needed_tokens(rollout.load)
        return [replica for replica in self.fleet.open() if replica.kv_capacity_tokens >= needed]

    def admitted(self, rollout: Rollout) -> None:
        pass

    def grown(self, rollout: Rollout) -> None:
        pass

    def released(self, rollout: Rollout, *, ended: bool, truncated: bool) -> None:
        pass

    def replicas_changed(self) -> None:
        pass

    def reported(self, replica: Replica, new_preemptions: int) -> None:
        pass

    def moves(self) -> Sequence[Move]:
        return ()

    def needed_tokens(self, load: RolloutLoad) -> int:
        return load.least_tokens

    def reserved_tokens(self, replica: Replica) -> int:
        return replica.reserved_tokens

    @property
    def risk(self) -> float:
        return 0.0

    def leftovers(self) -> list[str]:
        return [f"{len(self.waiting)} rollouts still queued"] if self.waiting else []

    def new_policy_version(self) -> None:
        pass

    def remember(
        self, max_response_tokens: int, max_turns: int, ended: Sequence[tuple[str, float, bool]], *, growth: float
    ) -> None:
        pass

    def learned(self) -> None:
        return None

    def know_again(self, learned: Learned) -> None:
        pass


class Static(QueueRule):
    """Each batch of submissions is cut into equal runs, one per replica, before anything starts."""

    name = "static"
    why = "its place in the batch: equal shares, cut up front"

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._share: dict[str, tuple[int, int]] = {}  # place in its batch, and the batch's size

    def submitted(self, rollouts: Sequence[Rollout]) -> None:
        super().submitted(rollouts)
        for place, rollout in enumerate(rollouts):
            self._share[rollout.load.rollout_id] = (place, len(rollouts))

    def choose(self, rollout: Rollout) -> Replica | None:
        replicas = self.candidates(rollout)
        if not replicas:
            return None
        place, size = self._share.pop(rollout.load.rollout_id)
        return replicas[place * len(replicas) // size]

    def unqueue(self, rollout: Rollout) -> None:
        super().unqueue(rollout)
        self._share.pop(rollout.load.rollout_id, None)


class RoundRobin(QueueRule):
    """Replicas in turn."""

    name = "round_robin"
    why = "the next in turn"

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._turn = 0

    def choose(self, rollout: Rollout) -> Replica | None:
        replicas = self.candidates(rollout)
        if not replicas:
            return None
        self._turn += 1
        return replicas[(self._turn - 1) % len(replicas)]


class ConsistentHash(QueueRule):
    """The replica with the highest hash of (rollout, replica): few rollouts move when the fleet changes."""

    name = "consistent_hash"
    why = "the highest hash with the rollout's id"

    def choose(self, rollout: Rollout) -> Replica | None:
        key = crc32(rollout.load.rollout_id.encode())
        return max(
            self.candidates(rollout), key=lambda replica: _mixed(key ^ crc32(replica.replica_id.encode())), default=None
        )


def _mixed(value: int) -> int:
    """MurmurHash3's finaliser: crc32 alone is linear, and would favour some replicas."""
    value = (value ^ value >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    value = (value ^ value >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


class LeastRequests(QueueRule):
    """Sticky; a rollout starts where the engine has fewest requests, by its last report and what was sent since."""

    name = "least_requests"
    why = "the fewest requests in its engine"

    def choose(self, rollout: Rollout) -> Replica | None:
        def requests(replica: Replica) -> int:
            return replica.load.running + replica.load.waiting + replica.admitted_since_report

        return min(self.candidates(rollout), key=requests, default=None)


class LeastSessions(QueueRule):
    """Sticky; a rollout starts where fewest rollouts live, at a tool or not."""

    name = "least_sessions"
    why = "the fewest rollouts live there"

    def choose(self, rollout: Rollout) -> Replica | None:
        return min(self.candidates(rollout), key=lambda replica: len(replica.residents), default=None)


IDLEST = "the fewest rollouts live there, and no better place has its prompt"


class PrefixAware(QueueRule):
    """Where the prompt is cached, unless that replica is well ahead of the idlest; then the idlest."""

    name = "prefix_aware"
    imbalance_rollouts = 32
    imbalance_ratio = 1.1

    def choose(self, rollout: Rollout) -> Replica | None:
        replicas = self.candidates(rollout)
        if not replicas:
            return None
        idlest = min(replicas, key=lambda replica: len(replica.residents))
        group = rollout.load.group_id
        cached = max(replicas, key=lambda replica: replica.groups.get(group, 0))
        self.why = IDLEST
        lead = len(cached.residents) - len(idlest.residents)
        if cached.groups.get(group, 0) == 0:
            return idlest
        if lead > self.imbalance_rollouts and len(cached.residents) > self.imbalance_ratio * len(idlest.residents):
            return idlest
        self.why = "the prompt is cached there"
        return cached


class WorstCase(QueueRule):
    """Reserve prompt and maximum response for a rollout's whole life, on the freest replica; wait where none has room.

    What the authors of arXiv:2508.20722 describe (section 3.2). Never overflows, and leaves most of the cache unused.
    """

    name = "worst_case"
    need = "its prompt and the longest response it may have, in whole blocks"
    why = "most KV that nobody has reserved"

    def choose(self, rollout: Rollout) -> Replica | None:
        def free(replica: Replica) -> int:
            return replica.kv_capacity_tokens - replica.reserved_tokens

        freest = max((r for r in self.candidates(rollout) if r.has_seat), key=free, default=None)
        return freest if freest is not None and free(freest) >= self.needed_tokens(rollout.load) else None

    def admitted(self, rollout: Rollout) -> None:
        assert rollout.replica is not None
        rollout.reserved_tokens = self.needed_tokens(rollout.load)
        rollout.replica.reserved_tokens += rollout.reserved_tokens

    def released(self, rollout: Rollout, *, ended: bool, truncated: bool) -> None:
        assert rollout.replica is not None
        rollout.replica.reserved_tokens -= rollout.reserved_tokens
        rollout.reserved_tokens = 0

    def needed_tokens(self, load: RolloutLoad) -> int:
        """Whole blocks: an engine never gives half of one."""
        return self.fleet.whole_blocks(load.worst_case_tokens)
