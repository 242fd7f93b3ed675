"""What a worker keeps of the turns that it plays, finished or under way: on disk, and for who goes on with them."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.generation.under_way import Sampled
from rstar_ray.agent.journal import TurnJournal
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, EngineError
from rstar_ray.trajectory import Completion

KEEP_EVERY_S = 0.1
KEEP_SHARE = 0.02
KEEP_AT_LEAST_EVERY_S = 5.0
"""How often what was sampled of turns under way is put down, and the share of a core that this may take."""
DISK_PATIENCE_S = 10.0
"""A disk that takes longer is no longer waited for: the balancer waits to hear of what has finished."""
MOST_UNWRITTEN_BYTES = 2**28
"""Kept in memory for such a disk; more, and it is as one that cannot be written."""


@dataclass(slots=True)
class _Begun:
    """Of one turn, by the weights that its first token here was sampled by."""

    weights: int  # their checksum
    began_s: float  # time.monotonic(), had one engine sampled all of it
    before: int = 0  # tokens that were sampled by another engine
    spent_s: float = 0.0  # until the last of its tokens

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    written: int = 0  # tokens that the journal has, or had when the rollout came here
    goes_on: bool = True  # False where more was sampled than is here

    @classmethod
    def of(cls, before: Completion | None, weights: int) -> "_Begun":
        now_s = time.monotonic()
        if before is None:
            return cls(weights, now_s)
        count = len(before.token_ids)
        columns = [*before.token_ids], [*before.logprobs], [*before.policy_versions]
        return cls(weights, now_s - before.spent_s, count, before.spent_s, *columns, written=count)

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
            spent_s=self.spent_s,
        )


class SampledBits(Protocol):
    """What is asked of an engine; see `actors.generation.engine.Engine`."""

    def newly_sampled(self) -> dict[str, Sampled]: ...


class KeptTurns:
    """Of the rollouts that one worker plays, each turn from its first token on.

    Without a journal nothing survives the worker, and of a turn that has not finished nothing its engine. A journal
    that cannot be written ends nothing: a line says so, and it is tried again with the next weights, when a step's
    file begins. A disk is waited for in a thread, one write after the other, and never by the event loop.
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
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="journal")  # starts none before its first use
        self._late: asyncio.Future[None] | None = None  # a write that is no longer waited for
        self._begun: dict[str, _Begun] = {}  # the turn that each rollout is in
        self._version, self._weights = 0, 0  # those of the model folder

    def serve(self, version: int, weights: int) -> None:
        """From now on turns are sampled by this version; `weights`: their checksum."""
        self._version, self._weights = version, weights
        self._fails = False

    def begin(self, state: RolloutState) -> None:
        """It is played here from now on."""
        if self._journal is not None:
            self._journal.begin(state)
            self._begun[state.request.rollout_id] = _Begun.of(state.begun, self._weights)

    def finished(self, state: RolloutState) -> None:
        """A turn has: on disk with the next `flush`, until which a death of this process takes it along.

        One that a swap fell into, or that came behind such a one, is of no use to who begins with either weights.
        """
        if self._journal is None:
            return
        if not self._fails and {*state.policy_versions} <= {-1, self._version}:
            self._journal.add(state, self._weights)
        else:
            self._journal.begin(state)  # what is put down later continues these tokens, and not those before
        self._begun[state.request.rollout_id] = _Begun.of(None, self._weights)

    def begun_again(self, state: RolloutState) -> RolloutState:
        """From its prompt, for what a tool kept for it is gone: nobody is to go on with what was sampled before."""
        again = state.begun_again()
        if self._journal is not None and not self._fails:
            self._journal.begin_again(again, self._weights)
        return again

    def end(self, rollout_id: str) -> None:
        """It is played here no longer."""
        self._begun.pop(rollout_id, None)
        if self._journal is not None:
            self._journal.end(rollout_id)

    def completed(self, rollout_id: str, done: Completion) -> None:
        """The completion of the turn that it is in has ended; its calls are still to be answered."""
        if turn := self._begun.get(rollout_id):
            known = len(turn.token_ids)
            if known < len(done.token_ids):
                self._note(turn, Sampled(known - turn.before, done.after(known)))

    async def flush(self) -> None:
        """All that was put down before is on disk, or a line has said that it is not."""
        if self._journal is None or self._fails or not (self._late or self._journal.has_unwritten):
            return
        if self._late is not None and not self._late.done():
            self._fails = self._journal.unwritten_bytes > MOST_UNWRITTEN_BYTES
            return
        late, self._late = self._late, None
        try:
            if late is not None:
                late.result()
            if self._journal.has_unwritten:
                await self._on_disk(self._journal.flush)
        except DeadlineExceeded as slow:
            self._say(str(slow))
        except (OSError, ValueError, RuntimeError) as failed:  # the third: there is no thread for it
            self._fails = True
            self._say(str(failed))
        else:
            if self._said:
                self._said = False
                self._show(f"{self._where} is written again")

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            self._show(
                f"{self._where} cannot be written ({why}): what is sampled here is not kept, and where this worker "
                "dies it is sampled again"
            )

    async def close(self) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError, DeadlineExceeded):
                await self._on_disk(self._journal.close)
        self._disk.shutdown(wait=False)

    async def _on_disk(self, write: Callable[[], None]) -> None:
        written = asyncio.get_running_loop().run_in_executor(self._disk, write)
        try:
            patience = asyncio.shield(written)
            await within(patience, DISK_PATIENCE_S, waiter="worker", owner="disk", reason=self._where, poll=True)
        except DeadlineExceeded:
            self._late = written  # it goes on, and so does what comes after it
            raise

    def reached(self, states: Mapping[str, RolloutState]) -> list[RolloutState]:
        """States at their last finished turns, with what there is of the next."""
        turns = {name: turn for name, turn in self._begun.items() if turn.token_ids}
        return [
            replace(state, begun=turns[name].completion()) if name in turns else state for name, state in states.items()
        ]

    async def keep(self, engine: SampledBits) -> None:
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
                if turn := self._begun.get(request_id.rpartition("/turn-")[0]):
                    self._note(turn, bit)
            self._put_down()
            took_s = time.thread_time() - started_s
            await self.flush()

    async def write(self) -> None:
        """All that was noted is on disk, as `flush` has it."""
        self._put_down()
        await self.flush()

    def _put_down(self) -> None:
        if self._journal is None or self._fails:
            return
        new = {name: turn for name, turn in self._begun.items() if self._weights == turn.weights and turn.is_longer}
        self._journal.add_begun({name: turn.completion(turn.written) for name, turn in new.items()}, self._weights)
        for turn in new.values():
            turn.written = len(turn.token_ids)

    def _note(self, turn: _Begun, bit: Sampled) -> None:
        """What was sampled since; of a turn that a swap falls into, up to there."""
        if len(turn.token_ids) == turn.before:
            turn.weights = self._weights
        follows = bit.start == len(turn.token_ids) - turn.before and turn.weights == self._weights
        by_these = bit.more.policy_versions[0] == self._version == bit.more.policy_versions[-1]
        turn.goes_on = turn.goes_on and follows and by_these
        if turn.goes_on:
            turn.token_ids += bit.more.token_ids
            turn.logprobs += bit.more.logprobs
            turn.policy_versions += bit.more.policy_versions
            turn.spent_s = time.monotonic() - turn.began_s
