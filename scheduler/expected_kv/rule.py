"""Our rule: admit while the residents' KV demand, now and later, stays below capacity at a given risk."""

from collections.abc import Sequence
from math import inf

from scheduler.expected_kv.admission_order import AdmissionOrder
from scheduler.expected_kv.caution import CLOSING_Z, ROOMY_SHARE, ROOMY_Z, Z_SPAN, Caution
from scheduler.expected_kv.learned import Learned
from scheduler.expected_kv.lengths import Lengths
from scheduler.expected_kv.moves import Moves
from scheduler.expected_kv.room import Room
from scheduler.records import Move
from scheduler.rules import Change, PlacementRule
from scheduler.state import Replica, Rollout, State


class ExpectedKV(PlacementRule):
    """Fill every replica to the brim of its expected KV; the longest-expected groups start first."""

    name = "expected_kv"

    def __init__(self, state: State, caution: Caution) -> None:
        super().__init__(state)
        self.caution = caution
        self.lengths = Lengths(state)
        self._step_demand_tokens = inf  # KV that this step was expected to need when it began
        self._step_begins = True
        self._order = AdmissionOrder(self.lengths)
        self._room = Room(state, self.lengths, self.caution)
        self._moves = Moves(state, self.lengths, self._room, caution)

    def pick(self) -> tuple[Rollout, Replica] | None:
        if self.lengths.learn():
            self._order.rank()
            context_tokens, life_steps = self.lengths.expected_life()
            replicas, has_history = self.state.replicas.values(), self.lengths.has_history
            self.caution.weigh(replicas, context_tokens, life_steps, has_history=has_history)
            self._room.ease(self._enough())
        rollout = self._order.next()
        replica = None if rollout is None else self._room.place(rollout, self._order.taken)
        if rollout is None or replica is None:
            return None
        self._order.take(rollout)
        rollout.why, rollout.prefer = self._room.why, None
        return rollout, replica

    def _enough(self) -> float | None:
        """Deviations that suffice where nothing, or little, is to be gained by holding rollouts back."""
        if not self._order or not self.lengths.has_history:
            return None
        capacity = sum(replica.kv_capacity_tokens for replica in self.state.open())
        demand = self.lengths.whole_demand_tokens()  # falls for a while when the first end, the short ones
        if self._step_begins or not any(replica.residents for replica in self.state.replicas.values()):
            self._step_begins = False
            self._step_demand_tokens = demand
        if max(self._step_demand_tokens, demand) <= ROOMY_SHARE * capacity:
            return ROOMY_Z
        return CLOSING_Z if self._room.expected_to_hold(self._order.demand()) else None

    def rollout_changed(self, rollout: Rollout, change: Change) -> None:
        if change is Change.QUEUED:
            self._order.add(rollout)
            self.lengths.stale()  # a new group must be ranked
        elif change is Change.ADMITTED:
            assert rollout.replica is not None
            self._moves.arrived(rollout)
            self._room.admitted(rollout, rollout.replica)
            self._order.remove(rollout)  # one that is resident where its replica registered was not picked
        elif change is Change.TURN_ENDED:
            self.lengths.grow(rollout)
            self._moves.turn_ended(rollout)
        elif change is Change.WITHDRAWN:
            if rollout.length_row >= 0:  # else it was never queued
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
            self.caution.ended()
        self._room.measure(replica)

    def new_policy_version(self) -> None:
        """The weights changed, and a step has ended: the rollouts that are live now are the next ones'."""
        self.lengths.new_policy_version()
        self._step_begins = True

    def replicas_changed(self) -> None:
        self._room.replicas_changed()

    def replica_reported(self, replica: Replica, new_preemptions: int) -> None:
        if new_preemptions > 0:
            self.caution.preempted()
            self._moves.preempted(replica, new_preemptions)
        self._room.reported(replica, some_wait=bool(self._order))

    def moves(self) -> Sequence[Move]:
        return self._moves.decide(some_wait=bool(self._order))

    def reserved_tokens(self, replica: Replica) -> int:
        return self._room.reserved_tokens(replica)

    # -- what no other rule has -----------------------------------------------------------------------------------
    @property
    def risk(self) -> float:
        """Share of rollouts that it lets an engine preempt."""
        return self.caution.risk

    def leaks(self) -> list[str]:
        """What it still keeps of rollouts although none is live."""
        return [*self.lengths.leaks(), *self._room.leaks(), *self._order.leaks()]

    def learned(self) -> Learned:
        """What outlives a step, for a checkpoint and for another incarnation of the balancer."""
        return Learned(
            lengths=self.lengths.learned(),
            raised_z=self.caution.raised_z,
            admissions=self._order.taken,
            moves=self._moves.counts(),
        )

    def load_learned(self, learned: Learned) -> None:
        """Replace what it has learned; pairs of budgets with live rollouts that are not in it are kept."""
        self.lengths.load_learned(learned.lengths)
        self.caution.raised_z = min(learned.raised_z, Z_SPAN)
        self._order.taken = learned.admissions
        self._moves.load_counts(learned.moves)
