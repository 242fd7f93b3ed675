"""The driver's client of generation: submits rollouts to the balancer and collects finished ones from workers.

Every request gets exactly one result, even if workers or the balancer are lost. The client holds only the tokens of
prompts, encoded once for all siblings; for sampled tokens it holds refs.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from actors.balancer_service import BalancerService, Known
from actors.generation.outbox import NUM_PARTS, Ended, rollout_load, with_refs
from actors.remote import Batch
from actors.service import Service
from rstar_ray.agent.journal import journaled
from rstar_ray.agent.rollout import RolloutState, score
from rstar_ray.chat.template import ChatFormat
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, RStarError, last_line
from rstar_ray.reward.judge import Judgement
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef, UnprovenRewards
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.served_weights import read_weights
from rstar_ray.run_dir.trajectory_log import ATTEMPT, ATTEMPT_NUMBER
from rstar_ray.trajectory import Problem, RolloutRequest, StopReason
from scheduler.expected_kv.learned import Learned
from scheduler.records import RolloutLoad

if TYPE_CHECKING:
    from actors.generation.generation_actor import GenerationActor

log = logging.getLogger(__name__)

R = TypeVar("R")
_Submission = tuple[RolloutLoad, RolloutState]
_Queue = asyncio.Queue[FinishedRollout | DroppedRollout | BaseException]

NOBODY = ""
"""Name of no replica, which asks the balancer for rollouts that no replica holds."""
SUBMIT_BATCH = 256
RETURN_BATCH = 32
"""Batch size of begun rollouts, which are large (16K tokens: 0.25 MB); the balancer serves others between batches."""
CALL_DEADLINE_S = 120.0
"""Deadline of calls to actors. The watchdog kills an actor that is stuck, and Ray restarts it."""
BLIP_PATIENCE_S = 3.0
"""How long a replica that could not be reached may take to answer again before it counts as lost."""
DELIVERY_WAIT_S = 20.0
"""How long one poll for finished rollouts stays open at a worker."""


class RolloutClient:
    """`Rollouts` (see rstar_ray.rollouts) with the balancer and the workers."""

    def __init__(
        self,
        balancer: Service[BalancerService],
        chat: ChatFormat,
        *,
        on_replica_lost: Callable[[str, Exception], Awaitable[None]],
        journal: Path | None = None,
        several_versions: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        """`journal`: the workers' folder of sampled turns. `several_versions`: a rollout may continue under newer
        weights. `on_replica_lost`: called for a replica that was lost or has failed. `silent_s`: how long a called
        actor may be silent before the watchdog kills it."""
        self._version, self._checksum = 0, 0  # of the weights that all workers serve; initially the model folder's
        self._journal = journal
        self._several_versions = several_versions
        self._balancer = balancer
        self._chat = chat
        self._on_replica_lost = on_replica_lost
        self._waiting: dict[str, _Submission] = {}
        self._open: dict[_Queue, frozenset[str]] = {}  # queue and ids of each open `run`
        self._queue_of: dict[str, _Queue] = {}  # by unfinished rollout
        self._fault: BaseException | None = None  # raised by every later `run`
        self._latest: frozenset[str] = frozenset()  # ids of the latest run
        self._attempt = 0  # incremented by `abandon`
        self.num_ended = 0  # over the whole run
        self._rewards = UnprovenRewards()
        self._deadline_s = CALL_DEADLINE_S + silent_s
        self._known: Known | None = None  # learned state of the balancer, for its next process
        self._learning = asyncio.Lock()
        self._num_recovering = 0  # losses whose rollouts are being read from the journal
        self._recovered = asyncio.Event()  # set while `_num_recovering` is 0
        self._recovered.set()
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._restoring: asyncio.Task[None] | None = None  # restores the state of a restarted balancer
        balancer.on_restart, balancer.on_death = self._balancer_restarted, self._balancer_died

    def follow(self, replica: "Service[GenerationActor]") -> None:
        """Collect the finished rollouts of this process of the replica, until it is lost."""
        self._readers[replica.name] = asyncio.create_task(self._read(replica))

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        """Yield the result of each request once. Prompts longer than the context are refused without a submission.

        Ids must be new: an id of an open `run` or the latest one raises `ValueError`, because the balancer may not have
        received the end of the earlier rollout yet, and would ignore the new one. Raises `RStarError` if none of the
        first rollouts could be judged.
        """
        ids = frozenset(request.rollout_id for request in requests)
        if again := sorted(ids & self._latest.union(*self._open.values())):
            raise ValueError(f"rollout {again[0]!r} was submitted before; every rollout needs a new id")
        self._latest = ids
        queue = _Queue()
        self._open[queue] = ids
        try:
            async for done in self._run(requests, queue):
                yield done
        finally:
            self._open.pop(queue, None)

    async def _run(
        self, requests: Sequence[RolloutRequest], queue: _Queue
    ) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        if self._fault is not None:
            queue.put_nowait(self._fault)
        fitting: dict[str, _Submission] = {}
        rules = {request.rollout_id: request.problem.reward for request in requests}
        prompts: dict[Problem, list[int]] = {}  # by problem, not by id: two sets may use the same ids
        for request in requests:
            problem = request.problem
            if problem not in prompts:
                prompts[problem] = self._chat.prompt_ids(problem)
            state = RolloutState.start(self._named_apart(request), prompts[problem])
            if state.stop_reason is StopReason.REFUSED:
                yield self._as_requested(await _refused(state))
            else:
                fitting[state.request.rollout_id] = (rollout_load(state), state)
        kept = await self._journaled([state for _, state in fitting.values()])
        fitting |= {name: (rollout_load(state), state) for name, state in kept.items()}
        self._waiting |= fitting
        self._queue_of |= dict.fromkeys(fitting, queue)
        await self._submit([*fitting])
        for _ in range(len(fitting)):
            done = await queue.get()
            if isinstance(done, BaseException):
                raise done
            done = self._as_requested(done)
            if isinstance(done, FinishedRollout):
                self._rewards.note(rules[done.summary.rollout_id], done.summary)
            yield done

    async def continue_without(self, replica_id: str) -> int:
        """Continue the rollouts of a lost replica on others. Returns how many continue from the journal."""
        self._num_recovering += 1
        self._recovered.clear()
        try:
            kept = await self._recover(replica_id)
        finally:
            self._num_recovering -= 1
            if not self._num_recovering:
                self._recovered.set()
        for first in range(0, len(kept), RETURN_BATCH):
            items = kept[first : first + RETURN_BATCH]
            reason = f"the turns of {replica_id}"
            await self._ask(lambda b, items=items: b.return_rollouts(replica_id, items), reason)
        lost = await self._ask(lambda b: b.replica_lost(replica_id), f"the rollouts of {replica_id}")
        if ended := [name for name in lost if name not in self._waiting]:
            await self._ask(lambda b: b.cancel(ended), f"rollouts that had ended on {replica_id}")
        await self.resubmit()
        return len(kept)

    async def _recover(self, replica_id: str) -> list[_Submission]:
        """Rollouts that the replica held and of which the journal has turns."""
        held = await self._ask(
            lambda b: b.held_by_lost(replica_id, [*self._waiting]), f"which rollouts {replica_id} held"
        )
        return [self._waiting[name] for name in await self._read_again(held) if name in self._waiting]

    async def _read_again(self, names: Sequence[str]) -> list[str]:
        """Read these rollouts from the journal, for later submissions; returns those of which it has turns."""
        kept = await self._journaled([self._waiting[name][1] for name in names if name in self._waiting])
        for name, state in kept.items():
            if name in self._waiting and _reach(state) > _reach(self._waiting[name][1]):
                self._waiting[name] = rollout_load(state), state
        return [*kept]

    async def _journaled(self, states: Sequence[RolloutState]) -> dict[str, RolloutState]:
        if self._journal is None:
            return {}
        known = {row.version: row.checksum for row in read_weights(self._journal)} if self._several_versions else {}
        known = {version: checksum for version, checksum in known.items() if version < self._version}
        known[self._version] = self._checksum
        return await asyncio.to_thread(journaled, self._journal, states, known, same=ATTEMPT_NUMBER)

    def serves(self, version: int, checksum: int) -> None:
        """All workers serve these weights now; turns in the journal that they sampled are valid."""
        self._version, self._checksum = version, checksum

    async def abandon(self) -> None:
        """Drop all unfinished rollouts, so that `run` may request them again; late results of dropped ones have other
        ids. Later rollouts run with the attempt in their ids; summaries and recorded trajectories have the requested
        ids.
        """
        given_up = [*self._waiting]
        self._waiting.clear()
        self._queue_of.clear()
        self._open.clear()
        self._latest = frozenset()
        self._attempt += 1
        await self._ask(lambda b: b.cancel(given_up), f"taking back {len(given_up)} rollouts")

    def _named_apart(self, request: RolloutRequest) -> RolloutRequest:
        if not self._attempt:
            return request
        attempt = f"{ATTEMPT}{self._attempt}"
        salt = request.cache_salt and request.cache_salt + attempt  # excludes KV of weights that were withdrawn
        return replace(request, rollout_id=request.rollout_id + attempt, cache_salt=salt)

    def _as_requested(self, done: FinishedRollout | DroppedRollout) -> FinishedRollout | DroppedRollout:
        """The result under the requested id."""
        if isinstance(done, DroppedRollout):
            return replace(done, rollout_id=self._requested_id(done.rollout_id))
        summary = replace(done.summary, rollout_id=self._requested_id(done.summary.rollout_id))
        return replace(done, summary=summary)

    def _requested_id(self, rollout_id: str) -> str:
        """The id without the number of the current attempt."""
        return rollout_id.removesuffix(f"{ATTEMPT}{self._attempt}") if self._attempt else rollout_id

    async def resubmit(self) -> None:
        """Submit unfinished rollouts that the balancer does not know, as after its restart.

        Rollouts that no replica holds are first read from the journal again, because returned states were lost with the
        balancer, and states being judged were lost with their worker.
        """
        with contextlib.suppress(DeadlineExceeded):  # without them these rollouts restart from their prompts
            reason = "turns sampled by lost replicas"
            await within(self._recovered.wait(), self._deadline_s, waiter="driver", owner="journal", reason=reason)
        if not self._waiting:
            return
        missing = await self._ask(lambda b: b.missing([*self._waiting]), "which rollouts it lacks")
        if missing and self._journal is not None:
            unheld = await self._ask(lambda b: b.held_by_lost(NOBODY, missing), "which rollouts no replica holds")
            await self._read_again(unheld)
        await self._submit(missing)

    async def close(self) -> None:
        tasks = [*self._readers.values(), *([self._restoring] if self._restoring else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _balancer_restarted(self) -> None:
        self._restoring = asyncio.create_task(self._restore_balancer(self._restoring))

    async def _restore_balancer(self, earlier: "asyncio.Task[None] | None") -> None:
        """Send the balancer's new process the learned state and every unfinished rollout."""
        if earlier is not None:
            await earlier
        try:
            await self.save_learned()
            await self.resubmit()
        except Exception as fault:  # this task is not awaited
            self._balancer_died(fault)

    def _balancer_died(self, fault: Exception) -> None:
        self._fail(RStarError(f"balancer: {last_line(fault)}"))

    def _fail(self, fault: RStarError) -> None:
        """Make every open and later `run` raise the fault."""
        self._fault = fault
        for queue in self._open:
            queue.put_nowait(fault)

    # -- learned state of the balancer ------------------------------------------------------------------------------
    async def save_learned(self) -> None:
        """Copy the balancer's learned state, if it answers; a restarted balancer first gets the earlier copy."""
        with best_effort("the balancer's learned state"):
            await self._latest_known()

    async def learned(self) -> dict[str, Any] | None:
        """The balancer's learned state for a checkpoint; None if its rule has none."""
        known = await self._latest_known()
        return known.learned.as_json() if known.learned is not None else None

    async def load_learned(self, saved: Mapping[str, object]) -> None:
        """Load the learned state of a checkpoint. Raises `ValueError` for an invalid value."""
        learned = Learned.from_json(saved)
        async with self._learning:
            self._known = await self._ask(lambda b: b.load_learned(learned), "loading what it had learned")

    async def _latest_known(self) -> Known:
        async with self._learning:
            before, known = self._known, await self._ask(lambda b: b.learned(), "what it has learned")
            earlier = before.learned if before is not None and before.incarnation != known.incarnation else None
            if earlier is not None:
                known = await self._ask(lambda b: b.load_learned(earlier), "loading what it had learned")
            self._known = known
            return known

    # -- calls ------------------------------------------------------------------------------------------------------
    async def _submit(self, names: Sequence[str]) -> None:
        """Submit these rollouts, except those that ended or were abandoned before their batch. Those that end or are
        abandoned during the call are cancelled, because `abandon` may come before the balancer receives them."""
        for first in range(0, len(names), SUBMIT_BATCH):
            batch = [name for name in names[first : first + SUBMIT_BATCH] if name in self._waiting]
            if not batch:
                continue
            items = [self._waiting[name] for name in batch]
            await self._ask(lambda b, items=items: b.submit(items), f"submitting {len(items)} rollouts")
            if ended := [name for name in batch if name not in self._waiting]:
                await self._ask(lambda b, ended=ended: b.cancel(ended), "rollouts that nothing waits for")

    async def _ask(self, ask: Callable[[BalancerService], Awaitable[R]], reason: str) -> R:
        """The balancer's answer; the call is repeated while it restarts."""
        return await self._balancer.call(ask, deadline_s=self._deadline_s, reason=reason, retry=True)

    async def _read(self, replica: "Service[GenerationActor]") -> None:
        try:
            await self._read_until_lost(replica)
        except Exception as fault:  # a reader is not awaited: `run` raises it
            self._fail(RStarError(f"{replica.name}: {last_line(fault)}"))

    async def _read_until_lost(self, replica: "Service[GenerationActor]") -> None:
        name, acknowledged = replica.name, 0
        methods = replica.methods(num_returns=1 + NUM_PARTS)
        while True:
            refs: Any = methods.take_finished(DELIVERY_WAIT_S, acknowledged)
            message, *parts = refs
            try:
                batch: Batch[Ended] = await within(
                    message,
                    DELIVERY_WAIT_S + self._deadline_s,
                    waiter="driver",
                    owner=name,
                    reason="what it finished",
                    poll=True,
                )
            except (RayTaskError, DeadlineExceeded) as failed:  # before the next case: an error may be both
                await self._on_replica_lost(name, failed)
                return
            except (RayActorError, ObjectLostError) as lost:  # ObjectLostError: the answer was on a lost node
                if await replica.same_process(BLIP_PATIENCE_S):
                    log.warning(f"{name} answers again after {type(lost).__name__}; no rollouts were lost")
                    continue
                await self._on_replica_lost(name, lost)
                return
            acknowledged = batch.number
            for ended in with_refs(batch.items, parts):
                if self._ends(ended.rollout_id) and (queue := self._queue_of.pop(ended.rollout_id, None)) is not None:
                    queue.put_nowait(ended)

    def _ends(self, rollout_id: str) -> bool:
        """Record the end of a rollout; False if it ended before, as when its worker was lost after finishing it."""
        known = self._waiting.pop(rollout_id, None) is not None
        self.num_ended += known
        return known


def _reach(state: RolloutState) -> tuple[int, int]:
    """Progress of a rollout as a sort key; a restart counts more than any earlier state."""
    return state.restarts, rollout_load(state).context_tokens


async def _refused(state: RolloutState) -> FinishedRollout:
    async def nothing_to_judge(completion: str, problem: Problem) -> Judgement:
        raise AssertionError("a refused rollout has no answer")

    trajectory = await score(state, nothing_to_judge)
    return FinishedRollout(summary=trajectory.summary, ref=TrajectoryRef(ray.put([trajectory]), 0))
