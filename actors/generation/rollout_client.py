"""The driver's view of generation: hands rollouts to the balancer and collects what the workers finish.

Every request comes back exactly once, whatever dies on the way. Of tokens it holds only the prompts', encoded here once
for all siblings; what is sampled stays behind refs.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError

from actors.balancer_service import BalancerService
from actors.generation.balancer_memory import BalancerMemory
from actors.generation.delivery import NUM_PARTS, Delivery
from actors.generation.outbox import rollout_load
from actors.remote import Remote
from rstar_ray.agent.journal import journaled
from rstar_ray.agent.rollout import RolloutState, score
from rstar_ray.chat.template import ChatFormat
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, RStarError
from rstar_ray.reward.judge import Judgement
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef, UnprovenRewards
from rstar_ray.trajectory import Problem, RolloutRequest, StopReason
from scheduler.records import RolloutLoad

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from actors.generation.generation_actor import GenerationActor

R = TypeVar("R")
_Submission = tuple[RolloutLoad, RolloutState]

ATTEMPT = "~"
"""Between a rollout's id and the number of its attempt, where all that was handed in before was given up."""
_ATTEMPT = re.compile(rf"{ATTEMPT}\d+$")
NOBODY = ""
"""A replica that the balancer does not know."""
SUBMIT_BATCH = 256
RETURN_BATCH = 32
"""Of rollouts that have begun: one of 16K tokens takes a quarter of a megabyte, and others are served in between."""
CALL_DEADLINE_S = 120.0
"""Longest wait for what is there. One that is stopped is ended first, by the detector, and starts again."""
BALANCER_PING_S = 2.0
BLIP_PATIENCE_S = 3.0
"""How long a worker that could not be reached may take to answer again before it is taken for lost."""
DELIVERY_WAIT_S = 20.0
"""How long one question for finished rollouts stays open at a worker before it is asked again."""


class RolloutClient:
    """`Rollouts` (see rstar_ray.rollouts) over the balancer and what the workers deliver."""

    def __init__(
        self,
        balancer: Remote[BalancerService],
        chat: ChatFormat,
        *,
        on_worker_lost: Callable[[str, Exception], Any],
        journal: Path | None = None,
        silent_s: float = 0.0,
    ) -> None:
        """`journal`: where the workers keep what was sampled. `on_worker_lost` hears of one that is gone, or of what
        one met in its own loops, which have ended then. `silent_s`: how long who is asked may be silent before the
        detector ends it."""
        self.weights = 0  # checksum of those that all workers serve; 0 for the model folder's
        self._journal = journal
        self._balancer = balancer
        self._chat = chat
        self._on_worker_lost = on_worker_lost
        self._finished: asyncio.Queue[FinishedRollout | DroppedRollout | BaseException] = asyncio.Queue()
        self._waiting: dict[str, _Submission] = {}
        self._latest: frozenset[str] = frozenset()  # ids of the latest run
        self._attempt = 0  # grows when what was handed in is given up
        self.num_ended = 0  # over the whole run
        self._rewards = UnprovenRewards()
        self._deadline_s = CALL_DEADLINE_S + silent_s
        self.memory = BalancerMemory(balancer, self._deadline_s)
        self._num_recovering = 0  # losses whose rollouts are being read from the journal
        self._recovered = asyncio.Event()  # none is
        self._recovered.set()
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    def follow(self, worker: "Remote[GenerationActor]", incarnation: str) -> None:
        """Collect what this process of the worker finishes, until it is lost."""
        self._readers[worker.name] = asyncio.create_task(self._read(worker, incarnation))

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        """Yield each request's end once. Prompts above the context end here, as refused.

        Ids must be new. A result comes here before the balancer hears that the rollout ended: the same id handed in
        meanwhile would be taken for the old one and be lost, so one of the latest run raises `ValueError`. Raises
        `RStarError` where none of the first rollouts could be judged.
        """
        ids = frozenset(request.rollout_id for request in requests)
        if again := sorted(ids & self._latest):
            raise ValueError(f"rollout {again[0]!r} was handed in before; every rollout needs an id of its own")
        self._latest = ids
        fitting: dict[str, _Submission] = {}
        rules = {request.rollout_id: request.problem.reward for request in requests}
        prompts: dict[Problem, list[int]] = {}  # siblings share theirs; two sets may number their problems alike
        for request in requests:
            problem = request.problem
            if problem not in prompts:
                prompts[problem] = self._chat.prompt_ids(problem)
            state = RolloutState.start(self._named_apart(request), prompts[problem])
            if state.stop_reason is StopReason.REFUSED:
                yield self._as_asked(await _refused(state))
            else:
                fitting[state.request.rollout_id] = (rollout_load(state), state)
        kept = await self._journaled([state for _, state in fitting.values()])
        fitting |= {name: (rollout_load(state), state) for name, state in kept.items()}
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_balancer())
        self._waiting |= fitting
        await self._submit(list(fitting.values()))
        for _ in range(len(fitting)):
            done = await self._finished.get()
            if isinstance(done, BaseException):
                raise done
            done = self._as_asked(done)
            if isinstance(done, FinishedRollout):
                self._rewards.note(rules[done.summary.rollout_id], done.summary)
            yield done

    async def go_on_without(self, replica_id: str) -> int:
        """A replica is gone: what it held goes on elsewhere. Returns of how many the journal has what was sampled."""
        self._num_recovering += 1
        self._recovered.clear()
        try:
            kept = await self._recover(replica_id)
        finally:
            self._num_recovering -= 1
            if not self._num_recovering:
                self._recovered.set()
        for first in range(0, len(kept), RETURN_BATCH):
            await self._return(replica_id, kept[first : first + RETURN_BATCH])
        lost = await self._ask(lambda b: b.replica_lost(replica_id), f"the rollouts of {replica_id}")
        if ended := [name for name in lost if name not in self._waiting]:
            await self._ask(lambda b: b.cancel(ended), f"rollouts that had ended on {replica_id}")
        await self.resubmit()
        return len(kept)

    async def _recover(self, replica_id: str) -> list[_Submission]:
        """Of what this replica held, that of which the journal has some: it goes on from there."""
        held = await self._ask(
            lambda b: b.held_by_lost(replica_id, [*self._waiting]), f"which rollouts {replica_id} held"
        )
        return [self._waiting[name] for name in await self._read_again(held) if name in self._waiting]

    async def _read_again(self, names: Sequence[str]) -> list[str]:
        """From now on these are handed in as far as the journal has them; returns those of which it has some."""
        kept = await self._journaled([self._waiting[name][1] for name in names if name in self._waiting])
        for name, state in kept.items():
            if name in self._waiting and _reach(state) > _reach(self._waiting[name][1]):
                self._waiting[name] = rollout_load(state), state
        return [*kept]

    async def _journaled(self, states: Sequence[RolloutState]) -> dict[str, RolloutState]:
        if self._journal is None:
            return {}
        return await asyncio.to_thread(journaled, self._journal, states, self.weights, same=_ATTEMPT)

    async def abandon(self) -> None:
        """Give up everything handed in and not finished: `run` may be asked for the same rollouts again.

        What is still on its way of the old ones is told apart by its name.
        """
        given_up = [*self._waiting]
        self._waiting.clear()
        self._latest = frozenset()
        self._attempt += 1
        ended = [self._finished.get_nowait() for _ in range(self._finished.qsize())]
        for fault in ended:
            if isinstance(fault, BaseException):
                self._finished.put_nowait(fault)
        await self._ask(lambda b: b.cancel(given_up), f"taking back {len(given_up)} rollouts")

    def _named_apart(self, request: RolloutRequest) -> RolloutRequest:
        if not self._attempt:
            return request
        return replace(request, rollout_id=f"{request.rollout_id}{ATTEMPT}{self._attempt}")

    def _as_asked(self, done: FinishedRollout | DroppedRollout) -> FinishedRollout | DroppedRollout:
        """Under the name by which it was asked for."""
        if isinstance(done, DroppedRollout):
            return replace(done, rollout_id=self._asked_for(done.rollout_id))
        summary = replace(done.summary, rollout_id=self._asked_for(done.summary.rollout_id))
        return replace(done, summary=summary)

    def _asked_for(self, rollout_id: str) -> str:
        """What came of earlier attempts is known to nobody here any more: this one's number is all that was added."""
        return rollout_id.removesuffix(f"{ATTEMPT}{self._attempt}") if self._attempt else rollout_id

    async def resubmit(self) -> None:
        """Hand in again what is not finished and what the balancer, or its life before, has lost.

        What no replica holds is among it: what was handed back to that life, and what a lost worker was judging.
        """
        with contextlib.suppress(DeadlineExceeded):  # then that begins at its prompt
            reason = "what lost replicas had sampled"
            await within(self._recovered.wait(), self._deadline_s, waiter="driver", owner="journal", reason=reason)
        if not self._waiting:
            return
        missing = await self._ask(lambda b: b.missing([*self._waiting]), "which rollouts it lacks")
        if missing and self._journal is not None:
            unheld = await self._ask(lambda b: b.held_by_lost(NOBODY, missing), "which rollouts no replica holds")
            await self._read_again(unheld)
        await self._submit([self._waiting[name] for name in missing if name in self._waiting])

    async def close(self) -> None:
        tasks = [*self._readers.values(), *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_balancer(self) -> None:
        """A balancer that Ray has restarted is empty: it gets what it had learned, and every unfinished rollout."""
        known = ""
        try:
            while True:
                with contextlib.suppress(ActorUnavailableError):
                    found = await self._balancer.call(
                        lambda b: b.incarnation(), deadline_s=self._deadline_s, reason="its incarnation", poll=True
                    )
                    if known not in ("", found):
                        await self.memory.note()
                        await self.resubmit()
                    known = found
                await asyncio.sleep(BALANCER_PING_S)
        except Exception as fault:  # nobody awaits this task either
            self._finished.put_nowait(RStarError(f"balancer: {last_line(fault)}"))

    async def _submit(self, submissions: Sequence[_Submission]) -> None:
        for first in range(0, len(submissions), SUBMIT_BATCH):
            await self._submit_batch(submissions[first : first + SUBMIT_BATCH])

    async def _submit_batch(self, items: Sequence[_Submission]) -> None:
        await self._ask(lambda b: b.submit(items), f"submitting {len(items)} rollouts")

    async def _return(self, replica_id: str, items: Sequence[_Submission]) -> None:
        await self._ask(lambda b: b.return_rollouts(replica_id, items), f"the turns of {replica_id}")

    async def _ask(self, ask: Callable[[BalancerService], Awaitable[R]], reason: str) -> R:
        """The balancer's answer; the call is repeated while it restarts."""
        return await self._balancer.call(ask, deadline_s=self._deadline_s, reason=reason, retry=True)

    async def _read(self, worker: "Remote[GenerationActor]", incarnation: str) -> None:
        try:
            await self._read_until_lost(worker, incarnation)
        except Exception as fault:  # nobody awaits a reader: what it met ends the run through `run`
            self._finished.put_nowait(RStarError(f"{worker.name}: {last_line(fault)}"))

    async def _read_until_lost(self, worker: "Remote[GenerationActor]", incarnation: str) -> None:
        replica_id, acknowledged = worker.name, 0
        methods = worker.methods(num_returns=1 + NUM_PARTS)
        while True:
            refs: Any = methods.take_finished(DELIVERY_WAIT_S, acknowledged)
            message, *parts = refs
            try:
                delivery: Delivery = await within(
                    message,
                    DELIVERY_WAIT_S + self._deadline_s,
                    waiter="driver",
                    owner=replica_id,
                    reason="what it finished",
                    poll=True,
                )
            except (RayTaskError, DeadlineExceeded) as failed:  # before the next: it may be both
                await self._on_worker_lost(replica_id, failed)
                return
            except (RayActorError, ObjectLostError) as lost:  # the second: its answer was on a node that is gone
                if await worker.incarnation(BLIP_PATIENCE_S) == incarnation:
                    log.warning(f"{replica_id} answers again after {type(lost).__name__}: nothing is lost")
                    continue
                await self._on_worker_lost(replica_id, lost)
                return
            acknowledged = delivery.number
            for ended in delivery.rollouts(parts):
                if self._ends(ended.rollout_id):
                    self._finished.put_nowait(ended)

    def _ends(self, rollout_id: str) -> bool:
        """False for one that ended before: its worker was lost after it had finished there."""
        known = self._waiting.pop(rollout_id, None) is not None
        self.num_ended += known
        return known


def _reach(state: RolloutState) -> tuple[int, int]:
    """How far a rollout is: one that began again is beyond all that it had before."""
    return state.restarts, rollout_load(state).context_tokens


def last_line(fault: BaseException) -> str:
    """A remote traceback ends with what went wrong."""
    lines = str(fault).strip().splitlines()
    return lines[-1] if lines else type(fault).__name__


async def _refused(state: RolloutState) -> FinishedRollout:
    async def nothing_to_judge(completion: str, problem: Problem) -> Judgement:
        raise AssertionError("a refused rollout has no answer")

    trajectory = await score(state, nothing_to_judge)
    return FinishedRollout(summary=trajectory.summary, ref=TrajectoryRef(ray.put([trajectory]), 0))
