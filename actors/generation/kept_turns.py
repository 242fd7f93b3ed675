"""What a worker keeps of the turns that it plays, finished or under way: on disk, and for who goes on with them."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.generation.under_way import Sampled
from rstar_ray.agent.journal import TurnJournal
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.errors import EngineError
from rstar_ray.trajectory import Completion

KEEP_EVERY_S = 0.1
KEEP_SHARE = 0.02
KEEP_AT_LEAST_EVERY_S = 5.0
"""How often what was sampled of turns under way is written down, and the share of a core that this may take."""


@dataclass(slots=True)
class _Begun:
    """Of one turn, by the weights that its first token was sampled by."""

    weights: int  # their checksum
    before: int = 0  # tokens that were sampled by another engine

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    written: int = 0  # tokens that the journal has, or had when the rollout came here
    goes_on: bool = True  # False where more was sampled than is here

    @classmethod
    def of(cls, before: Completion | None, weights: int) -> "_Begun":
        if before is None:
            return cls(weights)
        count = len(before.token_ids)
        columns = [*before.token_ids], [*before.logprobs], [*before.policy_versions]
        return cls(weights, count, *columns, written=count)

    @property
    def is_longer(self) -> bool:
        """Than what was written of it."""
        return len(self.token_ids) > self.written

    def completion(self, first: int = 0) -> Completion:
        rest = slice(first, None)
        return Completion(
            token_ids=self.token_ids[rest],
            logprobs=self.logprobs[rest],
            policy_versions=self.policy_versions[rest],
            ended=False,
        )


class SampledBits(Protocol):
    """What is asked of an engine; see `actors.generation.engine.Engine`."""

    def newly_sampled(self) -> dict[str, Sampled]: ...


class KeptTurns:
    """Of the rollouts that one worker plays, each turn from its first token on.

    Without a journal nothing survives the worker, and of a turn that has not finished nothing its engine. A journal
    that cannot be written ends nothing: a line says so, and it is tried again with the next weights, when a step's
    file begins.
    """

    def __init__(
        self, journal: TurnJournal | None, *, where: str = "the journal", show: Callable[[str], None] = print
    ) -> None:
        """`where`: what the journal is called where it cannot be written."""
        self._journal = journal
        self._where = where
        self._show = show
        self._fails = False  # the journal, under these weights
        self._said = False  # that it does
        self._begun: dict[str, _Begun] = {}
        self._version, self._weights = 0, 0  # those of the model folder

    def serve(self, version: int, weights: int) -> None:
        """From now on turns are sampled by this version; `weights`: their checksum."""
        self._version, self._weights = version, weights
        self._fails = False

    def begin(self, state: RolloutState) -> None:
        """It is played here from now on."""
        if self._journal is not None:
            self._journal.begin(state)

    def finished(self, state: RolloutState) -> None:
        """A turn has: on disk with the next `flush`, until which a death of this process takes it along."""
        self._begun.pop(state.request.rollout_id, None)
        if self._journal is None:
            return
        journal, weights = self._journal, self._weights
        if not self._written(lambda: journal.add(state, weights)):
            journal.begin(state)  # what is written later continues these tokens, and not those before

    def end(self, rollout_id: str) -> None:
        """It is played here no longer."""
        self._begun.pop(rollout_id, None)
        if self._journal is not None:
            self._journal.end(rollout_id)

    def completed(self, state: RolloutState, done: Completion) -> None:
        """The completion that comes after this state has ended; its calls are still to be answered."""
        if self._journal is not None:
            turn = self._turn(state)
            known = len(turn.token_ids)
            if known < len(done.token_ids):
                self._note(state, Sampled(known - turn.before, done.after(known)))

    def flush(self) -> None:
        if self._journal is not None and self._written(self._journal.flush) and self._said:
            self._said = False
            self._show(f"{self._where} is written again")

    def close(self) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError, ValueError):  # the latest is on disk by now, or was said not to be
                self._journal.close()

    def _written(self, write: Callable[[], None]) -> bool:
        """Whether it is, as far as can be told before the file is flushed."""
        if self._fails:
            return False
        try:
            write()
        except (OSError, ValueError) as failed:  # the second: a file that could not be flushed is closed all the same
            self._fails = True
            if not self._said:
                self._said = True
                self._show(
                    f"{self._where} cannot be written ({failed}): what is sampled here is not kept, and where this "
                    "worker dies it is sampled again"
                )
        return not self._fails

    def reached(self, states: Mapping[str, RolloutState]) -> list[RolloutState]:
        """States at their last finished turns, with what there is of the next."""
        begun = {name: self._begun[name].completion() for name in states.keys() & self._begun.keys()}
        return [replace(state, begun=begun.get(name, state.begun)) for name, state in states.items()]

    async def keep(self, engine: SampledBits, states: Mapping[str, RolloutState]) -> None:
        """Now and then, so that it costs little, write down what was sampled of turns that have not finished."""
        took_s = 0.0
        while self._journal is not None:
            await asyncio.sleep(min(max(KEEP_EVERY_S, took_s / KEEP_SHARE), KEEP_AT_LEAST_EVERY_S))
            started_s = time.thread_time()
            try:
                sampled = engine.newly_sampled()
            except EngineError:  # those that wait for its completions see to it
                return
            for request_id, bit in sampled.items():
                if state := states.get(request_id.rpartition("/turn-")[0]):
                    self._note(state, bit)
            self.write()
            took_s = time.thread_time() - started_s

    def write(self) -> None:
        """All that was noted is on disk."""
        if self._journal is None:
            return
        journal, weights = self._journal, self._weights
        new = {name: turn for name, turn in self._begun.items() if weights == turn.weights and turn.is_longer}
        parts = {name: turn.completion(turn.written) for name, turn in new.items()}
        if self._written(lambda: journal.add_begun(parts, weights)):
            self.flush()
            for turn in new.values():
                turn.written = len(turn.token_ids)

    def _note(self, state: RolloutState, bit: Sampled) -> None:
        """What was sampled since; of a turn that a swap falls into, up to there."""
        turn = self._turn(state)
        follows = bit.start == len(turn.token_ids) - turn.before and turn.weights == self._weights
        by_these = bit.more.policy_versions[0] == self._version == bit.more.policy_versions[-1]
        turn.goes_on = turn.goes_on and follows and by_these
        if turn.goes_on:
            turn.token_ids += bit.more.token_ids
            turn.logprobs += bit.more.logprobs
            turn.policy_versions += bit.more.policy_versions

    def _turn(self, state: RolloutState) -> _Begun:
        rollout_id = state.request.rollout_id
        if rollout_id not in self._begun:
            self._begun[rollout_id] = _Begun.of(state.begun, self._weights)
        return self._begun[rollout_id]
