"""Our rule: admit while the residents' KV demand, now and later, stays below capacity at a given risk."""

from collections.abc import Sequence
from math import inf

from scheduler.expected_kv.admission_order import Order
from scheduler.expected_kv.caution import CLOSING_Z, ROOMY_SHARE, ROOMY_Z, Z_SPAN, Caution
from scheduler.expected_kv.lengths import Lengths
from scheduler.expected_kv.moves import Moves
from scheduler.expected_kv.room import Room
from scheduler.fleet import Fleet, Replica, Rollout
from scheduler.learned import Learned
from scheduler.records import Move, RolloutLoad


class ExpectedKV:
    """Fill every replica to the brim of its expected KV; the longest-expected groups start first."""

    name = "expected_kv"
    need = "its context and one more"
    why = ""

    def __init__(self, fleet: Fleet, caution: Caution) -> None:
        self.caution = caution
        self._fleet = fleet
        self._foretold_tokens = inf  # KV that this step was expected to need when it began
        self._lengths = Lengths(fleet)
        self._order = Order(self._lengths)
        self._room = Room(fleet, self._lengths, self.caution)
        self._moves = Moves(fleet, self._lengths, self._room, caution)

    def submitted(self, rollouts: Sequence[Rollout]) -> None:
        self._order.add(rollouts)
        self._lengths.stale()  # new groups must be ranked

    def unqueue(self, rollout: Rollout) -> None:
        self._order.remove(rollout)

    def withdrawn(self, rollout: Rollout) -> None:
        if rollout.length_row >= 0:  # else it was never seen here
            self._moves.arrived(rollout)
            self._order.remove(rollout)
            self._lengths.withdraw(rollout)

    def pick(self) -> tuple[Rollout, Replica] | None:
        if self._lengths.learn():
            self._order.rank()
            context_tokens, life_steps = self._lengths.expected_life()
            replicas, taught = self._fleet.by_id.values(), self._lengths.taught
            self.caution.weigh(replicas, context_tokens, life_steps, taught=taught)
            self._room.ease(self._enough())
        rollout = self._order.next()
        replica = None if rollout is None else self._room.place(rollout, self._order.taken)
        if rollout is None or replica is None:
            return None
        self._order.take(rollout)
        self.why, rollout.prefer = self._room.why, None
        return rollout, replica

    def _enough(self) -> float | None:
        """Deviations that suffice where nothing, or little, is to be gained by holding rollouts back."""
        if not self._order or not self._lengths.taught:
            return None
        capacity = sum(replica.kv_capacity_tokens for replica in self._fleet.open())
        demand = self._lengths.whole_demand_tokens()  # falls for a while when the first end, the short ones
        if not any(replica.residents for replica in self._fleet.by_id.values()):
            self._foretold_tokens = demand
        if max(self._foretold_tokens, demand) <= ROOMY_SHARE * capacity:
            return ROOMY_Z
        return CLOSING_Z if self._room.expected_to_hold(self._order.demand()) else None

    def admitted(self, rollout: Rollout) -> None:
        assert rollout.replica is not None
        self._moves.arrived(rollout)
        self._room.admitted(rollout, rollout.replica)

    def grown(self, rollout: Rollout) -> None:
        self._lengths.grow(rollout)
        self._moves.turn_ended(rollout)

    def released(self, rollout: Rollout, *, ended: bool, truncated: bool) -> None:
        replica = rollout.replica
        assert replica is not None
        self._room.released(rollout, replica)
        self._lengths.leave(rollout, ended=ended, truncated=truncated)
        if ended:
            self._moves.arrived(rollout)
            self.caution.ended()
        self._room.measure(replica)

    def replicas_changed(self) -> None:
        self._room.replicas_changed()

    def reported(self, replica: Replica, new_preemptions: int) -> None:
        if new_preemptions > 0:
            self.caution.preempted()
            self._moves.preempted(replica, new_preemptions)
        self._room.reported(replica, some_wait=bool(self._order))

    def moves(self) -> Sequence[Move]:
        return self._moves.decide(some_wait=bool(self._order))

    def needed_tokens(self, load: RolloutLoad) -> int:
        return load.least_tokens

    def reserved_tokens(self, replica: Replica) -> int:
        return self._room.reserved_tokens(replica)

    @property
    def risk(self) -> float:
        return self.caution.risk

    def leftovers(self) -> list[str]:
        return [*self._lengths.leftovers(), *self._room.leftovers(), *self._order.leftovers()]

    def new_policy_version(self) -> None:
        self._lengths.new_policy_version()

    def remember(
        self, max_response_tokens: int, max_turns: int, ended: Sequence[tuple[str, float, bool]], *, growth: float
    ) -> None:
        self._lengths.remember(max_response_tokens, max_turns, ended, growth=growth)

    def learned(self) -> Learned:
        return Learned(
            lengths=self._lengths.learned(),
            raised_z=self.caution.raised_z,
            admissions=self._order.taken,
            moves=self._moves.counts(),
        )

    def know_again(self, learned: Learned) -> None:
        self._lengths.know_again(learned.lengths)
        self.caution.raised_z = min(learned.raised_z, Z_SPAN)
        self._order.taken = learned.admissions
        self._moves.count_from(learned.moves)
