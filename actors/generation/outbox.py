"""A worker's output: reports to the balancer, trajectories to the driver, finished turns to the journal."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from actors.remote import Batch
from rstar_ray.agent.journal import TurnJournal, weights_of
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef
from rstar_ray.trajectory import Trajectory, TrajectorySummary
from scheduler.records import RolloutLoad, TurnReport

NUM_PARTS = 16
"""Number of objects that hold a batch's trajectories; a learner rank fetches only those with its rows."""

Ended = TrajectorySummary | DroppedRollout


def rollout_load(state: RolloutState) -> RolloutLoad:
    """A rollout's load for the scheduler.

    The budgets are those that the rollout was admitted with. An agent may exceed them: with a prompt shorter than the
    problem's, or with several lines, of which the engine holds one at a time. So the lengths stop at the budgets.
    """
    first = state.admitted or state
    request, prompt = first.request, len(first.prompt_ids)
    most = max(1, min(request.limits.max_response_tokens, request.limits.max_context_tokens - prompt))
    num_tokens = len(state.prompt_ids) + len(state.response_ids)
    return RolloutLoad(
        rollout_id=request.rollout_id,
        group_id=request.group_id,
        prompt_tokens=prompt,
        max_response_tokens=most,
        max_turns=request.limits.max_turns,
        context_tokens=min(max(num_tokens, prompt), prompt + most),
        generated_tokens=min(sum(turn.num_tokens for turn in state.turns), most),
        turn=len(state.turns),
        draw=request.draw,
        budget=max(most, request.limits.max_response_tokens),
    )


@dataclass(slots=True)
class Outbox:
    """Reports for the balancer, in order. The balancer ignores repeated reports."""

    turns: list[TurnReport] = field(default_factory=list[TurnReport])
    returned: dict[str, tuple[RolloutLoad, RolloutState]] = field(default_factory=dict)  # the latest by rollout id

    def after(self, earlier: "Outbox") -> "Outbox":
        """This outbox merged with an earlier one that was not delivered."""
        return Outbox([*earlier.turns, *self.turns], {**earlier.returned, **self.returned})

    def turn_ended(self, state: RolloutState, *, ended: bool = False) -> None:
        """`ended`: the rollout has ended too; without a `stop_reason`, by a failure of ours."""
        load = rollout_load(state)
        self.turns.append(
            TurnReport(
                rollout_id=load.rollout_id,
                context_tokens=load.context_tokens,
                generated_tokens=load.generated_tokens,
                turn=load.turn,
                ended=ended,
                truncated=ended and (state.stop_reason is None or state.stop_reason.truncated),
            )
        )

    def hand_back(self, state: RolloutState) -> None:
        self.returned[state.request.rollout_id] = rollout_load(state), state


def without_tokens(batch: Batch[Trajectory | DroppedRollout]) -> tuple[Batch[Ended], list[list[Trajectory]]]:
    """The message to the driver, and the trajectories: the k-th is in part k % `NUM_PARTS`."""
    ended = tuple(one.summary if isinstance(one, Trajectory) else one for one in batch.items)
    trajectories = [one for one in batch.items if isinstance(one, Trajectory)]
    return Batch(batch.number, ended), [trajectories[part::NUM_PARTS] for part in range(NUM_PARTS)]


def with_refs(ended: Sequence[Ended], parts: Sequence[Any]) -> list[FinishedRollout | DroppedRollout]:
    """The rollouts of a message with refs to their trajectories; `parts`: refs of the lists."""
    rollouts: list[FinishedRollout | DroppedRollout] = []
    index = 0  # in the trajectories
    for one in ended:
        if isinstance(one, DroppedRollout):
            rollouts.append(one)
            continue
        position, part = divmod(index, NUM_PARTS)
        rollouts.append(FinishedRollout(summary=one, ref=TrajectoryRef(parts[part], position)))
        index += 1
    return rollouts


log = logging.getLogger(__name__)

DISK_PATIENCE_S = 10.0
"""Longest wait for one write, because reports to the balancer wait too."""
MAX_UNWRITTEN_BYTES = 2**28
"""Limit of unwritten data while the disk is slow; above it the disk counts as failed."""


class JournalWriter:
    """Writes the turns of one worker to its journal, if there is one.

    A failure is logged once, and the journal is tried again with the next weights, which begin a new file. Writes run
    one after the other in a thread, not on the event loop.
    """

    def __init__(self, journal: TurnJournal | None, *, where: str = "the journal") -> None:
        """`where`: the journal's name in log messages."""
        self._journal = journal
        self._where = where
        self._failed = False  # the journal failed under the current weights
        self._reported = False  # the failure was logged
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="journal")  # starts its thread at the first write
        self._late: asyncio.Future[None] | None = None  # a write that took longer than `DISK_PATIENCE_S`
        self._served = {0: 0}  # checksum by version; initially the model folder's
        self._weights = 0  # checksum of the newest version
        self._unnamed: list[tuple[RolloutState, RolloutState]] = []  # turns of a version without a known checksum

    def serve(self, version: int, weights: int) -> None:
        """Set the version that samples from now on; `weights`: its checksum."""
        self._served[version] = weights
        self._weights = weights
        self._failed = False
        unnamed, self._unnamed = self._unnamed, []
        for before, after in unnamed:
            self._add(before, after)

    def turn_finished(self, before: RolloutState, after: RolloutState) -> None:
        """Record the turn between two states; the next `flush` writes it.

        A turn whose version's checksum is not known yet is recorded by the next `serve`.
        """
        if self._journal is not None and not self._failed and not self._add(before, after):
            self._unnamed.append((before, after))

    def _add(self, before: RolloutState, after: RolloutState) -> bool:
        assert self._journal is not None
        versions = after.policy_versions[len(before.policy_versions) :]
        weights = weights_of(versions, self._served) if versions else self._weights
        if weights is not None:
            self._journal.add(before, after, weights)
        return weights is not None

    def restarted(self, state: RolloutState) -> None:
        """Record that the rollout restarts from its prompt, so that its earlier turns are ignored."""
        if self._journal is not None and not self._failed:
            self._journal.restart(state, self._weights)

    async def flush(self) -> None:
        """Write everything recorded so far, or log a warning."""
        if self._journal is None or self._failed or not (self._late or self._journal.has_unwritten):
            return
        if self._late is not None and not self._late.done():
            self._failed = self._journal.unwritten_bytes > MAX_UNWRITTEN_BYTES
            return
        late, self._late = self._late, None
        try:
            if late is not None:
                late.result()
            if self._journal.has_unwritten:
                await self._on_disk(self._journal.flush)
        except DeadlineExceeded as slow:
            self._report(str(slow))
        except (OSError, ValueError, RuntimeError) as failed:  # RuntimeError: no thread could be started
            self._failed = True
            self._report(str(failed))
        else:
            if self._reported:
                self._reported = False
                log.warning("%s is written again", self._where)

    async def close(self) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError, DeadlineExceeded):
                await self._on_disk(self._journal.close)
        self._disk.shutdown(wait=False)

    def _report(self, why: str) -> None:
        if not self._reported:
            self._reported = True
            log.warning(
                "%s cannot be written (%s): turns that finish now are sampled again if this worker dies",
                self._where,
                why,
            )

    async def _on_disk(self, write: Callable[[], None]) -> None:
        writing = asyncio.get_running_loop().run_in_executor(self._disk, write)
        try:
            patience = asyncio.shield(writing)
            await within(patience, DISK_PATIENCE_S, waiter="worker", owner="disk", reason=self._where, poll=True)
        except DeadlineExceeded:
            self._late = writing  # it continues, and later writes wait for it
            raise
