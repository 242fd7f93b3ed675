"""The oracle: a simple schedule of a step that knows every length in advance.

No run can use it, so no option selects it. No schedule is faster than the lower bound; the oracle shows how much of a
rule's distance from the bound is due to unknown lengths. The longest rollout that fits is admitted first, to the
replica with the least KV-time ahead; it fits if the cache can hold it to its end together with the residents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.expected_kv.estimate import Floats
from scheduler.rules import Change, FirstComeFirstServed
from scheduler.simulator.simulate import Simulator, SimulatorResult, SimulatorSettings, named
from scheduler.state import Replica, Rollout, State
from scheduler.traces.trace import TraceRollout, cut

STEPS = 64  # decode steps that are counted as one
HEADROOM = 0.98  # share of a cache that is used: tools' answers and waits shift ends a little
TRIES = 6  # waiting rollouts, evenly spaced by length, that are tried if the longest does not fit


@dataclass(frozen=True, slots=True)
class _Stay:
    """KV tokens [bins] that one rollout will hold on a replica, from bin `first` on."""

    replica_id: str
    first: int
    tokens: Floats


@dataclass(frozen=True, slots=True)
class Ending:
    """The final numbers of tokens of a rollout: sampled, and of the whole response."""

    sampled_tokens: int
    response_tokens: int


class Oracle(FirstComeFirstServed):
    """Longest first, with endings known in advance."""

    name = "oracle"

    def __init__(self, state: State, endings: Mapping[str, Ending]) -> None:
        super().__init__(state)
        self._endings = endings
        self._order: list[Rollout] | None = None  # the queue, longest first; None: to be sorted
        self._ahead: dict[str, Floats] = {}  # by replica: KV tokens planned in each bin of its decode steps
        self._stays: dict[str, _Stay] = {}
        self._nothing_fits = False  # until something changes

    def pick(self) -> tuple[Rollout, Replica] | None:
        if self._nothing_fits:
            return None
        if self._order is None:
            self._order = sorted(self.state.queue.values(), key=lambda r: -self._ending(r).sampled_tokens)
        replicas = self.state.open()
        for place in dict.fromkeys(len(self._order) * tried // TRIES for tried in range(TRIES)):
            if place < len(self._order) and (replica := self.choose(self._order[place], replicas)) is not None:
                return self._order.pop(place), replica
        self._nothing_fits = True
        return None

    def _ending(self, rollout: Rollout) -> Ending:
        return self._endings[rollout.load.rollout_id]

    def choose(self, rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
        fitting: dict[str, float] = {}
        for replica in replicas:
            stay = self._stay(rollout, replica)
            ahead = self._ahead_of(replica, stay.first + len(stay.tokens))[stay.first :]
            peak = (ahead[: len(stay.tokens)] + stay.tokens).max()
            if replica.has_seat and peak <= HEADROOM * replica.kv_capacity_tokens:
                fitting[replica.replica_id] = float(ahead.sum())
        return self.state.replicas[min(fitting, key=fitting.__getitem__)] if fitting else None

    def _ahead_of(self, replica: Replica, bins: int) -> Floats:
        known = self._ahead.get(replica.replica_id, np.zeros(0))
        if len(known) < bins:
            known = self._ahead[replica.replica_id] = np.concatenate([known, np.zeros(2 * bins - len(known))])
        return known

    def _stay(self, rollout: Rollout, replica: Replica) -> _Stay:
        load, ending = rollout.load, self._ending(rollout)
        left = max(1, ending.sampled_tokens - load.generated_tokens)  # one decode step each; tools' text takes no step
        growth = (ending.response_tokens - load.response_tokens) / left
        now = int(replica.decode_step)
        ends = (np.arange(now // STEPS, (now + left) // STEPS + 1) + 1) * STEPS - now
        siblings = replica.groups.get(load.group_id, 0) - (rollout.replica is replica)
        prompt = 0 if siblings else load.prompt_tokens
        held = prompt + load.response_tokens + growth * np.minimum(ends, left) + self.state.block_tokens / 2
        return _Stay(replica.replica_id, now // STEPS, held)

    def rollout_changed(self, rollout: Rollout, change: Change) -> None:
        if change is Change.ADMITTED:
            self._plan(rollout)
        elif change.leaves:
            self._left(rollout)
        elif change is not Change.TURN_ENDED:
            self._order, self._nothing_fits = None, False

    def _plan(self, rollout: Rollout) -> None:
        assert rollout.replica is not None
        stay = self._stays[rollout.load.rollout_id] = self._stay(rollout, rollout.replica)
        end = stay.first + len(stay.tokens)
        self._ahead_of(rollout.replica, end)[stay.first : end] += stay.tokens

    def _left(self, rollout: Rollout) -> None:
        assert rollout.replica is not None
        stay = self._stays.pop(rollout.load.rollout_id)
        past = max(0, int(rollout.replica.decode_step) // STEPS + 1 - stay.first)  # past bins do not change
        end = stay.first + len(stay.tokens)
        self._ahead[stay.replica_id][stay.first + past : end] -= stay.tokens[past:]
        self._nothing_fits = False

    def replicas_changed(self) -> None:
        self._nothing_fits = False


def oracle_step(rollouts: Sequence[TraceRollout], settings: SimulatorSettings) -> SimulatorResult:
    """Simulate the step with the oracle."""
    limits = (settings.max_response_tokens, settings.max_turns)
    whole = {name: cut(rollout, *limits) for name, rollout in named(rollouts).items()}
    endings = {name: Ending(one.generated_tokens, one.response_tokens) for name, one in whole.items()}
    return Simulator(rollouts, lambda state: Oracle(state, endings), settings).run()
