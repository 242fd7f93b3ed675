"""Which rollouts change their replica between two turns.

A move computes the context again, so it must be repaid by faster tokens, and all of them together stay within a small
share of the tokens generated. Where an estimate was wrong, and replicas overflow, some wait until there is room again.
"""

from collections.abc import Sequence
from math import inf

from scheduler.expected_kv.caution import Caution
from scheduler.expected_kv.learned import MoveCounts
from scheduler.expected_kv.lengths import Lengths
from scheduler.expected_kv.room import Room
from scheduler.records import Move
from scheduler.state import Replica, Rollout, State

MOVE_SHARE = 0.003  # tokens computed again because of moves, at most, of all generated
PRESSED_SHARE = 0.008  # the same, where the alternative is an engine's preemption, which wastes more; once
# engines do preempt, as much again as they have thrown away
PRESSED_Z = 0.5  # a replica is pressed when its demand exceeds its cache with this margin
WAIT_Z = 0.0  # the same, to send some back to wait: they do so only where an overflow is more likely than not
LEAD_TURNS = 1.0  # a rollout that is asked to leave does so at the end of its turn
MOVE_GAIN = 4.0  # a token decoded costs at least this many tokens prefilled

RELIEVED = "moved here, before the cache of its replica overflows"
EMPTIER = "moved here, where less than half as much KV is in use"


class Moves:
    """Looks at rollouts that have ended a turn since the last look."""

    def __init__(self, state: State, lengths: Lengths, room: Room, caution: Caution) -> None:
        self.state = state
        self._lengths = lengths
        self._room = room
        self._caution = caution
        self._turned: list[Rollout] = []
        self._bound_for: dict[str, str] = {}  # of those asked to leave and not there yet: id, replica
        self._turns = 0
        self._moved_tokens = 0
        self._preempted_tokens = 0
        self._generated_before = 0  # by earlier incarnations

    def turn_ended(self, rollout: Rollout) -> None:
        self._turned.append(rollout)
        self._turns += 1

    def arrived(self, rollout: Rollout) -> None:
        """It runs on a replica, or is over."""
        if (target := self._bound_for.pop(rollout.load.rollout_id, None)) is not None:
            self._room.expect_no_longer(rollout, target)

    def preempted(self, replica: Replica, times: int) -> None:
        """The engine drops contexts: as many tokens may be spent on relief, which recomputes each context once."""
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
        """Continue counting from these."""
        self._generated_before = before.generated_tokens - self.state.generated_tokens
        self._turns, self._moved_tokens = before.turns, before.moved_tokens
        self._preempted_tokens = before.preempted_tokens

    def decide(self, *, some_wait: bool) -> Sequence[Move]:
        """Away from a replica about to overflow, and, once nothing waits, from a full one to one less than half as
        full, where enough is still to come. From one that overflows all the same some go back to wait.
        """
        turned, self._turned = self._turned, []
        moves: list[Move] = []
        used: dict[str, float] = {}
        overfull: dict[str, Replica] = {}
        for rollout in turned:
            source = rollout.replica
            if source is None or rollout.leaving:
                continue
            context = rollout.load.context_tokens
            pressed = self._room.peak(source, PRESSED_Z, staying=True) > source.kv_capacity_tokens
            if pressed:
                overfull[source.replica_id] = source
            elif some_wait:
                continue
            share = PRESSED_SHARE if pressed else MOVE_SHARE
            allowed = share * self._generated_tokens + (self._preempted_tokens if pressed else 0)
            if self._moved_tokens + context > allowed:
                continue
            used = used or {replica.replica_id: self._room.used_tokens(replica) for replica in self.state.open()}
            target = self._relief(rollout, source) if pressed else self._emptiest(rollout, source, used)
            if target is None:
                continue
            rollout.prefer = target
            rollout.why = RELIEVED if pressed else EMPTIER
            used[target] += context
            used[source.replica_id] = used.get(source.replica_id, 0.0) - context
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
        """The shortest contexts of a replica that overflows before its residents have ended another turn.

        An engine out of blocks takes them from contexts whose rollouts are at a tool, and computes those again at every
        turn; a context that waits is computed once.
        """
        turn_tokens = self._generated_tokens / max(1, self._turns)
        stay = [rollout for rollout in source.residents.values() if not rollout.leaving]
        stay.sort(key=lambda rollout: rollout.load.context_tokens, reverse=True)
        moves: list[Move] = []
        allowed = self._preempted_tokens if self._lengths.has_history else inf
        while len(stay) > 1 and self._moved_tokens + stay[-1].load.context_tokens <= allowed:
            peak = self._room.peak(source, WAIT_Z, staying=True, within_tokens=LEAD_TURNS * turn_tokens)
            if peak <= source.kv_capacity_tokens:
                break
            moves.append(self._asked_to_leave(stay.pop(), source, None))
        return moves

    def _emptiest(self, rollout: Rollout, source: Replica, used: dict[str, float]) -> str | None:
        """The emptiest other replica, where moving there is worth it."""
        target = min((name for name in used if name != source.replica_id), key=used.__getitem__, default=None)
        if target is None:
            return None
        context = rollout.load.context_tokens
        if used[target] + context > 0.5 * (self._room.used_tokens(source) - context):
            return None
        if MOVE_GAIN * self._lengths.remaining_tokens(rollout) < context:
            return None
        return target if self._room.fits(self.state.replicas[target], rollout) else None

    def _relief(self, rollout: Rollout, source: Replica) -> str | None:
        """The replica with the lowest peak ahead, where the rollout would leave it below its cache and the source."""
        others = [r for r in self.state.open() if r is not source and r.has_seat]
        target = min(others, key=lambda r: self._room.peak(r, PRESSED_Z) / r.kv_capacity_tokens, default=None)
        if target is None:
            return None
        peak = self._room.peak(target, PRESSED_Z, rollout)
        least = min(target.kv_capacity_tokens, self._room.peak(source, PRESSED_Z, staying=True))
        return target.replica_id if peak <= least else None
