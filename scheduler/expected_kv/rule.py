"""The placement rule: admit while residents' KV demand stays below capacity, now and later, at a given risk."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from scheduler.expected_kv.caution import Caution
from scheduler.expected_kv.learned import Learned, MoveCounts
from scheduler.expected_kv.lengths import Group, Lengths
from scheduler.expected_kv.room import Room
from scheduler.records import Move
from scheduler.rules import Change, PlacementRule
from scheduler.state import Replica, Rollout, State

RELIEF_SHARE = 0.008  # limit of tokens recomputed because of moves, of all generated; when engines
# preempt, plus as many tokens as they have discarded
PRESSED_Z = 0.5  # a replica is pressed when its demand exceeds its cache with this margin
WAIT_Z = 0.0  # the same, to send rollouts back to wait: only if an overflow is more likely than not
LEAD_TURNS = 1.0  # a rollout that is asked to leave stays until the end of its turn

RELIEVED = "moved here, before the cache of its replica overflows"


class Moves:
    """Decides on moves of rollouts that have ended a turn since the last decision."""

    def __init__(self, state: State, room: Room, caution: Caution) -> None:
        self.state = state
        self._room = room
        self._caution = caution
        self._turned: list[Rollout] = []
        self._bound_for: dict[str, str] = {}  # rollouts that were asked to move and have not arrived: id, replica
        self._turns = 0
        self._moved_tokens = 0
        self._preempted_tokens = 0
        self._generated_before = 0  # by earlier incarnations

    def turn_ended(self, rollout: Rollout) -> None:
        self._turned.append(rollout)
        self._turns += 1

    def arrived(self, rollout: Rollout) -> None:
        """The rollout runs on a replica, or has ended."""
        if (target := self._bound_for.pop(rollout.load.rollout_id, None)) is not None:
            self._room.expect_no_longer(rollout, target)

    def preempted(self, replica: Replica, times: int) -> None:
        """The engine drops contexts: as many tokens may be spent on moves, which recompute each context once."""
        contexts = sum(rollout.load.context_tokens for rollout in replica.residents.values())
        self._preempted_tokens += times * contexts // max(1, len(replica.residents))

    @property
    def _generated_tokens(self) -> int:
        return self._generated_before + self.state.generated_tokens

    def counts(self) -> MoveCounts:
        return MoveCounts(
            generated_tokens=self._generated_tokens,
            turns=self._turns,
            moved_tokens=self._moved_tokens,
            preempted_tokens=self._preempted_tokens,
        )

    def load_counts(self, before: MoveCounts) -> None:
        """Continue from these counts."""
        self._generated_before = before.generated_tokens - self.state.generated_tokens
        self._turns, self._moved_tokens = before.turns, before.moved_tokens
        self._preempted_tokens = before.preempted_tokens

    def decide(self) -> Sequence[Move]:
        """Moves away from replicas that are about to overflow. If one overflows nevertheless, some rollouts wait."""
        turned, self._turned = self._turned, []
        moves: list[Move] = []
        overfull: dict[str, Replica] = {}
        for rollout in turned:
            source = rollout.replica
            if source is None or rollout.leaving:
                continue
            if self._room.peak(source, PRESSED_Z, staying=True) <= source.kv_capacity_tokens:
                continue
            overfull[source.replica_id] = source
            allowed = RELIEF_SHARE * self._generated_tokens + self._preempted_tokens
            if self._moved_tokens + rollout.load.context_tokens > allowed:
                continue
            if (target := self._relief(rollout, source)) is not None:
                rollout.prefer, rollout.why = target, RELIEVED
                moves.append(self._asked_to_leave(rollout, source, target))
        for source in overfull.values() if self._caution.spares_contexts else ():
            moves += self._sent_to_wait(source)
        return moves

    def _asked_to_leave(self, rollout: Rollout, source: Replica, target: str | None) -> Move:
        rollout.leaving = True
        if target is not None:
            self._bound_for[rollout.load.rollout_id] = target
        self._room.asked_to_leave(rollout, source, target)
        self._moved_tokens += rollout.load.context_tokens
        return Move(rollout.load.rollout_id, source.replica_id, target)

    def _sent_to_wait(self, source: Replica) -> list[Move]:
        """Send back the shortest contexts of a replica that overflows before its residents end another turn.

        An engine without free blocks takes them from contexts whose rollouts wait for a tool, and recomputes those at
        every turn; a context that waits is recomputed once.
        """
        turn_tokens = self._generated_tokens / max(1, self._turns)
        stay = [rollout for rollout in source.residents.values() if not rollout.leaving]
        stay.sort(key=lambda rollout: rollout.load.context_tokens, reverse=True)
        moves: list[Move] = []
        while len(stay) > 1:
            peak = self._room.peak(source, WAIT_Z, staying=True, within_tokens=LEAD_TURNS * turn_tokens)
            if peak <= source.kv_capacity_tokens:
                break
            moves.append(self._asked_to_leave(stay.pop(), source, None))
        return moves

    def _relief(self, rollout: Rollout, source: Replica) -> str | None:
        """The replica with the lowest expected peak, if it stays below its cache and the source with the rollout."""
        others = [r for r in self.state.open() if r is not source and r.has_seat]
        target = min(others, key=lambda r: self._room.peak(r, PRESSED_Z) / r.kv_capacity_tokens, default=None)
        if target is None:
            return None
        peak = self._room.peak(target, PRESSED_Z, rollout)
        least = min(target.kv_capacity_tokens, self._room.peak(source, PRESSED_Z, staying=True))
        return target.replica_id if peak <= least else None


PROBES = 4  # siblings of each group that start before groups are ranked by length
FEW_GROUPS = 512  # ranked in less than 20 ms


class AdmissionOrder:
    """All waiting rollouts."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._ranked: list[tuple[int, int, float, int, Group]] = []  # heap: draw, probes done, minus length, tie
        self._resumed: OrderedDict[str, Rollout] = OrderedDict()  # by draw
        self.taken = 0
        self.num_unranked = 0  # rollouts added since groups were ranked

    def __bool__(self) -> bool:
        return bool(self._ranked or self._resumed)

    @property
    def exhausted(self) -> bool:
        """Whether all ranked rollouts have started, and others wait to be ranked; valid after `next`."""
        return not self._ranked and self.num_unranked > 0

    def add(self, rollout: Rollout) -> bool:
        """Whether groups must be ranked before the next decision. With many groups they are ranked again when as many
        rollouts have come: otherwise the time is quadratic in the groups of a large evaluation, which come in batches.
        """
        group, load = self._lengths.track(rollout), rollout.load
        if load.context_tokens == load.prompt_tokens and rollout.prefer is None:
            group.fresh[load.rollout_id] = rollout
        else:
            behind = next(reversed(self._resumed.values()), None)
            self._resumed[load.rollout_id] = rollout
            if behind is not None and behind.load.draw > load.draw:
                for other in sorted(self._resumed.values(), key=lambda waiting: waiting.load.draw):
                    self._resumed.move_to_end(other.load.rollout_id)
        self.num_unranked += 1
        num_groups = len(self._lengths.groups)
        precedes = bool(self._ranked) and load.draw < self._ranked[0][0]
        return precedes or num_groups <= FEW_GROUPS or self.num_unranked >= num_groups

    def remove(self, rollout: Rollout) -> None:
        """The rollout no longer waits: it runs on a replica, or was cancelled."""
        self._resumed.pop(rollout.load.rollout_id, None)
        group = self._lengths.group_of(rollout)
        if group.fresh.pop(rollout.load.rollout_id, None) is not None:
            group.started += 1

    def leaks(self) -> list[str]:
        return [f"{len(self._resumed)} interrupted rollouts still queued"] if self._resumed else []

    def rank(self) -> None:
        """Sort groups by their expected length."""
        self.num_unranked = 0
        self._ranked = [
            (group.draw, min(group.started, PROBES), -self._expected(group), tie, group)
            for tie, group in enumerate(self._lengths.groups.values())
            if group.fresh
        ]
        heapq.heapify(self._ranked)

    def _expected(self, group: Group) -> float:
        fresh = group.budgets.fresh_of(group)
        assert fresh is not None
        return float(fresh.length_G[group.index])

    def next(self) -> Rollout | None:
        while self._ranked and not self._ranked[0][-1].fresh:
            heapq.heappop(self._ranked)
        draw = self._ranked[0][0] if self._ranked else None
        resumed = next(iter(self._resumed.values()), None)
        if resumed is not None and (draw is None or resumed.load.draw <= draw):
            return resumed
        return next(iter(self._ranked[0][-1].fresh.values())) if self._ranked else None

    def take(self, rollout: Rollout) -> None:
        """The rollout is admitted now."""
        self.taken += 1
        if self._resumed.pop(rollout.load.rollout_id, None) is not None:
            return
        group = self._lengths.group_of(rollout)
        del group.fresh[rollout.load.rollout_id]
        group.started += 1
        if self._ranked and self._ranked[0][-1] is group:
            draw, _, length, tie, _ = heapq.heappop(self._ranked)
            if group.fresh:
                heapq.heappush(self._ranked, (draw, min(group.started, PROBES), length, tie, group))


class ExpectedKV(PlacementRule):
    """Fill every replica up to its expected KV capacity; groups with the longest expected length start first."""

    name = "expected_kv"

    def __init__(self, state: State, caution: Caution) -> None:
        super().__init__(state)
        self.caution = caution
        self.lengths = Lengths(state)
        self._order = AdmissionOrder(self.lengths)
        self._room = Room(state, self.lengths, self.caution)
        self._moves = Moves(state, self._room, caution)

    def pick(self) -> tuple[Rollout, Replica] | None:
        self._learn()
        rollout = self._order.next()
        if self._order.exhausted:
            self.lengths.stale()
            self._learn()
            rollout = self._order.next()
        replica = None if rollout is None else self._room.place(rollout, self._order.taken)
        if rollout is None or replica is None:
            return None
        self._order.take(rollout)
        rollout.why, rollout.prefer = self._room.why, None
        return rollout, replica

    def _learn(self) -> None:
        if self.lengths.learn():
            self._order.rank()
            self.caution.weigh(self.state.replicas.values(), *self.lengths.expected_life())

    def rollout_changed(self, rollout: Rollout, change: Change) -> None:
        if change is Change.QUEUED:
            if self._order.add(rollout):
                self.lengths.stale()
        elif change is Change.ADMITTED:
            assert rollout.replica is not None
            self._moves.arrived(rollout)
            self._room.admitted(rollout, rollout.replica)
            self._order.remove(rollout)  # `pick` has not removed one that was resident when its replica registered
        elif change is Change.TURN_ENDED:
            self.lengths.grow(rollout)
            self._moves.turn_ended(rollout)
        elif change is Change.WITHDRAWN:
            if rollout.length_row >= 0:  # otherwise it was never queued
                self._moves.arrived(rollout)
                self._order.remove(rollout)
                self.lengths.withdraw(rollout)
        else:
            self._left(rollout, change)

    def _left(self, rollout: Rollout, change: Change) -> None:
        replica, ended = rollout.replica, change is not Change.REQUEUED
        assert replica is not None
        self._room.released(rollout, replica)
        self.lengths.leave(rollout, ended=ended, truncated=change is Change.CUT)
        if ended:
            self._moves.arrived(rollout)
        self._room.measure(replica)

    def new_policy_version(self) -> None:
        """The weights changed and a step has ended: rollouts that are live now belong to later steps."""
        self.lengths.new_policy_version()

    def replicas_changed(self) -> None:
        self._room.replicas_changed()

    def replica_reported(self, replica: Replica, new_preemptions: int) -> None:
        if new_preemptions > 0:
            self._moves.preempted(replica, new_preemptions)
        self._room.reported(replica, some_wait=bool(self._order))

    def moves(self) -> Sequence[Move]:
        return self._moves.decide()

    def reserved_tokens(self, replica: Replica) -> int:
        return self._room.reserved_tokens(replica)

    # -- methods of this rule only --------------------------------------------------------------------------------
    @property
    def risk(self) -> float:
        """Share of rollouts that the rule allows an engine to preempt."""
        return self.caution.risk

    def leaks(self) -> list[str]:
        """Entries that remain although no rollout is live."""
        return [*self.lengths.leaks(), *self._room.leaks(), *self._order.leaks()]

    def learned(self) -> Learned:
        """The state that outlives a step, for a checkpoint and for another incarnation of the balancer."""
        return Learned(
            lengths=self.lengths.learned(),
            admissions=self._order.taken,
            moves=self._moves.counts(),
        )

    def load_learned(self, learned: Learned) -> None:
        """Replace the learned state; pairs of budgets with live rollouts that are not in it are retained."""
        self.lengths.load_learned(learned.lengths)
        self._order.taken = learned.admissions
        self._moves.load_counts(learned.moves)
