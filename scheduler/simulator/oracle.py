"""A reference that reads the future: what a plain schedule makes of a step when it knows every length.

No run can have it, so it is none of the rules; beside the lower bound, which no schedule can beat, it tells how much
of a rule's distance from that bound is not knowing. The longest rollout that fits goes first, to the replica with the
least KV-time ahead; it fits where the cache holds it to its end beside all that is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.estimate import Floats
from scheduler.fleet import Fleet, Replica, Rollout
from scheduler.rules import QueueRule
from scheduler.simulator.simulate import Twin, TwinResult, TwinSettings, named
from scheduler.traces.trace import TraceRollout, cut

STEPS = 64  # decode steps told apart as one
HEADROOM = 0.98  # of a cache, that is planned with: tools' answers and waits shift ends a little
TRIES = 6  # lengths, evenly spaced over those waiting, that are tried when the longest does not fit


@dataclass(frozen=True, slots=True)
class _Stay:
    """KV tokens [bins] that one rollout will hold on a replica, from bin `first` on."""

    replica_id: str
    first: int
    tokens: Floats


@dataclass(frozen=True, slots=True)
class Fate:
    """What will become of a rollout: tokens that it will have sampled, and those of its whole response."""

    sampled_tokens: int
    response_tokens: int


class Clairvoyant(QueueRule):
    """Longest first, by fates told in advance."""

    name = "clairvoyant"

    def __init__(self, fleet: Fleet, fates: Mapping[str, Fate]) -> None:
        super().__init__(fleet)
        self._fates = fates
        self._order: list[Rollout] = []  # waiting, longest first
        self._ahead: dict[str, Floats] = {}  # by replica: KV tokens planned in each bin of its decode steps
        self._stays: dict[str, _Stay] = {}
        self._nothing_fits = False  # until something changes

    def submitted(self, rollouts: Sequence[Rollout]) -> None:
        super().submitted(rollouts)
        self._order = sorted(self.waiting.values(), key=lambda r: -self._fates[r.load.rollout_id].sampled_tokens)
        self._nothing_fits = False

    def unqueue(self, rollout: Rollout) -> None:
        if rollout.load.rollout_id in self.waiting:
            self._order.remove(rollout)
        super().unqueue(rollout)

    def pick(self) -> tuple[Rollout, Replica] | None:
        if self._nothing_fits:
            return None
        for place in dict.fromkeys(len(self._order) * tried // TRIES for tried in range(TRIES)):
            if place < len(self._order) and (replica := self.choose(self._order[place])) is not None:
                rollout = self._order.pop(place)
                del self.waiting[rollout.load.rollout_id]
                return rollout, replica
        self._nothing_fits = True
        return None

    def choose(self, rollout: Rollout) -> Replica | None:
        fitting: dict[str, float] = {}
        for replica in self.candidates(rollout):
            stay = self._stay(rollout, replica)
            ahead = self._ahead_of(replica, stay.first + len(stay.tokens))[stay.first :]
            peak = (ahead[: len(stay.tokens)] + stay.tokens).max()
            if replica.has_seat and peak <= HEADROOM * replica.kv_capacity_tokens:
                fitting[replica.replica_id] = float(ahead.sum())
        return self.fleet.by_id[min(fitting, key=fitting.__getitem__)] if fitting else None

    def _ahead_of(self, replica: Replica, bins: int) -> Floats:
        known = self._ahead.get(replica.replica_id, np.zeros(0))
        if len(known) < bins:
            known = self._ahead[replica.replica_id] = np.concatenate([known, np.zeros(2 * bins - len(known))])
        return known

    def _stay(self, rollout: Rollout, replica: Replica) -> _Stay:
        load, fate = rollout.load, self._fates[rollout.load.rollout_id]
        left = max(1, fate.sampled_tokens - load.generated_tokens)  # a step for each; tools' text comes without
        growth = (fate.response_tokens - load.response_tokens) / left
        now = int(replica.decode_step)
        ends = (np.arange(now // STEPS, (now + left) // STEPS + 1) + 1) * STEPS - now
        siblings = replica.groups.get(load.group_id, 0) - (rollout.replica is replica)
        prompt = 0 if siblings else load.prompt_tokens
        held = prompt + load.response_tokens + growth * np.minimum(ends, left) + self.fleet.block_tokens / 2
        return _Stay(replica.replica_id, now // STEPS, held)

    def admitted(self, rollout: Rollout) -> None:
        assert rollout.replica is not None
        stay = self._stays[rollout.load.rollout_id] = self._stay(rollout, rollout.replica)
        end = stay.first + len(stay.tokens)
        self._ahead_of(rollout.replica, end)[stay.first : end] += stay.tokens

    def released(self, rollout: Rollout, *, ended: bool, truncated: bool) -> None:
        assert rollout.replica is not None
        stay = self._stays.pop(rollout.load.rollout_id)
        past = max(0, int(rollout.replica.decode_step) // STEPS + 1 - stay.first)  # what was held, was held
        end = stay.first + len(stay.tokens)
        self._ahead[stay.replica_id][stay.first + past : end] -= stay.tokens[past:]
        self._nothing_fits = False

    def replicas_changed(self) -> None:
        self._nothing_fits = False


def clairvoyant_step(rollouts: Sequence[TraceRollout], settings: TwinSettings) -> TwinResult:
    """The step as this reference runs it."""
    limits = (settings.max_response_tokens, settings.max_turns)
    lives = {name: cut(rollout, *limits) for name, rollout in named(rollouts).items()}
    fates = {name: Fate(life.generated_tokens, life.response_tokens) for name, life in lives.items()}
    return Twin(rollouts, lambda fleet: Clairvoyant(fleet, fates), settings).run()
