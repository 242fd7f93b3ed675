"""A generation worker: one engine and the agent loops of the rollouts it was granted.

It keeps one question for work open at the balancer and reports finished turns in batches: while one report is on its
way the next fills up. Finished trajectories leave as a stream of return values, so that they outlive this process.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray

from actors.generation.engine import Engine, EngineFacts, EngineSettings
from actors.sandbox_executor import SandboxClient
from actors.weights.buckets import WeightBucket
from rstar_ray.agent.reward import VerifyFn
from rstar_ray.agent.rollout import ExecuteFn, RolloutState, run_rollout, score
from rstar_ray.chat.template import ChatFormat, TokenizerChat
from rstar_ray.config import SandboxConfig
from rstar_ray.deadline import within
from rstar_ray.errors import EngineError, SandboxError
from rstar_ray.rollouts import DroppedRollout
from rstar_ray.run_dir.trajectory_log import write_trajectories
from rstar_ray.trajectory import (
    Completion,
    RolloutRequest,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectorySummary,
)
from scheduler.load import Finished, ReplicaLoad, RolloutLoad, TurnReport, UnknownReplica, in_flight_limit
from scheduler.picture import Activity, KvSample, Span, Timeline

T = TypeVar("T")

GRANT_WAIT_S = 20.0
"""How long one question for work stays open before it is asked again."""
REPORT_GATHER_S = 0.002
"""Turns that finish together are reported together."""
REPORT_EVERY_S = 0.02
"""Shortest time between two reports: a call to the balancer costs as much as a decode step."""

TIMELINE_SPANS = 100_000
"""Of the latest work, kept for pictures: a few steps' worth."""

CALL_DEADLINE_S = 60.0
"""Longest wait for any answer of the balancer."""
RESTART_PATIENCE_S = 45.0
"""How long a balancer that restarts is asked again."""


class BalancerCalls(Protocol):
    """The balancer as a worker sees it; see `actors.balancer.BalancerService`."""

    def register(
        self,
        replica_id: str,
        kv_capacity_tokens: int,
        max_running: int,
        policy_version: int,
        resident: Sequence[RolloutLoad],
    ) -> Awaitable[Any]: ...
    def report(
        self, replica_id: str, turn_reports: Sequence[TurnReport], finished: Sequence[Finished], load: ReplicaLoad
    ) -> Awaitable[Any]: ...
    def next_grants(self, replica_id: str, ack: int, wait_s: float) -> Awaitable[Any]: ...
    def return_rollouts(self, replica_id: str, items: Sequence[tuple[RolloutLoad, Any]]) -> Awaitable[Any]: ...


@dataclass(slots=True)
class _Outbox:
    """What has happened since the last report."""

    turns: list[TurnReport] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    returned: list[tuple[RolloutLoad, RolloutState]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.turns or self.finished or self.returned)


class GenerationWorker:
    """Plays the rollouts it is granted. One event loop; every rollout is one task."""

    def __init__(
        self,
        replica_id: str,
        *,
        engine: Engine,
        max_running: int,
        chat: ChatFormat,
        balancer: BalancerCalls,
        execute: ExecuteFn,
        verify: VerifyFn,
        die: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._max_running = max_running
        self._chat = chat
        self._balancer = balancer
        self._execute = execute
        self._verify = verify
        self._die = die
        self._facts: EngineFacts | None = None
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, RolloutState] = {}  # of what is playing, at its last finished turn
        self._leaving: set[str] = set()  # to be handed back at their next turn boundary
        self._outbox = _Outbox()
        self._reporting = asyncio.Event()
        self._done: list[Trajectory | DroppedRollout] = []
        self._delivering = asyncio.Event()
        self._spans: deque[Span] = deque(maxlen=TIMELINE_SPANS)
        self._kv_samples: deque[KvSample] = deque(maxlen=TIMELINE_SPANS)
        self._loops: list[asyncio.Task[None]] = []
        self._engine_died: EngineError | None = None
        self._fault: BaseException | None = None  # of our own making; ends the run through `results`

    def __repr__(self) -> str:
        return self._replica_id

    async def start(self) -> EngineFacts:
        """Start the engine; rollouts come once `serve` is called."""
        self._facts = await self._engine.start()
        return self._facts

    async def serve(self) -> None:
        """Register with the balancer and take work until closed."""
        await self._register()
        self._loops = [asyncio.create_task(self._take_grants()), asyncio.create_task(self._send_reports())]
        for loop in self._loops:
            loop.add_done_callback(self._note_fault)

    async def results(self) -> AsyncIterator[list[TrajectorySummary | DroppedRollout] | list[Trajectory]]:
        """What has finished, in batches as they come, each as two lists: summaries, then trajectories.

        The first summaries are those of the trajectories, in their order; rollouts without a trajectory follow.
        """
        while True:
            self._delivering.clear()
            if self._fault is not None:
                raise self._fault
            if self._done:
                batch, self._done = self._done, []
                trajectories = [done for done in batch if isinstance(done, Trajectory)]
                dropped = [done for done in batch if isinstance(done, DroppedRollout)]
                yield [*(trajectory.summary for trajectory in trajectories), *dropped]
                yield trajectories
            await self._delivering.wait()

    async def pull(self, policy_version: int, buckets: Sequence[WeightBucket]) -> int:
        """Serve these weights from now on; returns their checksum as the engine has them."""
        try:
            update = await self._engine.update_weights(policy_version, list(buckets))
        except EngineError as died:
            await self._end(died)
            raise
        return update.checksum

    async def record(self, trajectories: Sequence[Trajectory], path: Path, *, stage: str, step: int) -> None:
        """Write trajectories in readable form."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trajectories(path, trajectories, self._chat.decode, stage=stage, step=step)

    def timeline(self, rollouts: str) -> Timeline:
        """What rollouts whose ids begin so did here, and the KV in use meanwhile; seconds since the epoch."""
        spans = [span for span in self._spans if span.rollout_id.startswith(rollouts)]
        first, last = min((s.start_s for s in spans), default=0.0), max((s.end_s for s in spans), default=0.0)
        samples = [sample for sample in self._kv_samples if first <= sample.at_s <= last]
        return Timeline(spans, samples, self._facts.kv_capacity_tokens if self._facts else 0)

    def load(self) -> ReplicaLoad:
        """The engine's load, for the balancer and for metrics."""
        engine = self._engine.load()
        self._kv_samples.append(KvSample(self._replica_id, time.time(), engine.kv_used_tokens))
        return ReplicaLoad(
            kv_used_tokens=engine.kv_used_tokens,
            running=engine.running,
            waiting=engine.waiting,
            preemptions=engine.preemptions,
            policy_version=self._engine.policy_version,
            steps=engine.steps,
        )

    async def close(self) -> None:
        for task in [*self._loops, *self._playing.values()]:
            task.cancel()
        await asyncio.gather(*self._loops, *self._playing.values(), return_exceptions=True)
        await self._engine.close()

    # -- work ---------------------------------------------------------------------------------------------------------
    async def _register(self) -> Any:
        assert self._facts is not None, "start() comes before serve()"
        grants = await self._ask(
            self._balancer.register(
                self._replica_id,
                self._facts.kv_capacity_tokens,
                in_flight_limit(self._max_running),
                self._engine.policy_version,
                [rollout_load(state) for state in self._states.values()],
            ),
            "register",
        )
        self._cancel(grants.cancels)
        return grants

    async def _take_grants(self) -> None:
        acknowledged = 0
        while True:
            try:
                grants = await self._ask(
                    self._balancer.next_grants(self._replica_id, acknowledged, GRANT_WAIT_S), "grants", GRANT_WAIT_S
                )
            except UnknownReplica:  # the balancer came back empty
                acknowledged = (await self._register()).number
                continue
            acknowledged = grants.number
            self._leaving |= {move.rollout_id for move in grants.moves} & self._playing.keys()
            self._cancel(grants.cancels)
            for grant in grants.admissions:
                self._begin(grant.payload)

    def _begin(self, payload: RolloutRequest | RolloutState) -> None:
        if isinstance(payload, RolloutRequest):
            payload = RolloutState.start(payload, self._chat.prompt_ids(payload.problem))
        rollout_id = payload.request.rollout_id
        if rollout_id in self._playing:  # a grant delivered twice
            return
        self._states[rollout_id] = payload
        task = asyncio.create_task(self._play(payload))
        task.add_done_callback(self._note_fault)
        self._playing[rollout_id] = task

    def _cancel(self, rollout_ids: Sequence[str]) -> None:
        for rollout_id in rollout_ids:
            if task := self._playing.pop(rollout_id, None):
                task.cancel()
            self._states.pop(rollout_id, None)

    async def _play(self, state: RolloutState) -> None:
        rollout_id = state.request.rollout_id

        async def generate(prompt_ids: Sequence[int], **asked: Any) -> Completion:
            return await self._noted(Activity.GENERATE, rollout_id, self._engine.generate(prompt_ids, **asked))

        async def execute(call: ToolCall) -> ToolResult:
            return await self._noted(Activity.TOOL, rollout_id, self._execute(call))

        try:
            state = await run_rollout(
                state, generate=generate, execute=execute, chat=self._chat, go_on=self._turn_finished
            )
            if state.stop_reason is None:
                self._hand_back(state)
                return
            self._release(state)  # its KV cache is free; checking the answer holds nobody up
            self._deliver(await score(state, self._verify))
        except SandboxError as failed:
            self._release(self._states.get(rollout_id, state))
            reason = f"sandbox: {failed}"
            self._deliver(DroppedRollout(rollout_id=rollout_id, group_id=state.request.group_id, reason=reason))
        except EngineError as died:
            await self._end(died)

    async def _noted(self, activity: Activity, rollout_id: str, work: Awaitable[T]) -> T:
        began_s = time.time()
        try:
            return await work
        finally:
            self._spans.append(Span(self._replica_id, rollout_id, activity, began_s, time.time()))

    def _turn_finished(self, state: RolloutState) -> bool:
        rollout_id = state.request.rollout_id
        self._states[rollout_id] = state
        if rollout_id in self._leaving:
            return False
        load = rollout_load(state)
        self._outbox.turns.append(
            TurnReport(
                rollout_id=rollout_id,
                context_tokens=load.context_tokens,
                generated_tokens=load.generated_tokens,
                turn=load.turn,
            )
        )
        self._reporting.set()
        return True

    def _release(self, state: RolloutState) -> None:
        load = rollout_load(state)
        self._forget(load.rollout_id)
        self._outbox.finished.append(
            Finished(
                rollout_id=load.rollout_id,
                context_tokens=load.context_tokens,
                generated_tokens=load.generated_tokens,
                turn=load.turn,
                truncated=state.stop_reason is StopReason.TRUNCATED,
            )
        )
        self._reporting.set()

    def _hand_back(self, state: RolloutState) -> None:
        self._forget(state.request.rollout_id)
        self._outbox.returned.append((rollout_load(state), state))
        self._reporting.set()

    def _forget(self, rollout_id: str) -> None:
        self._playing.pop(rollout_id, None)
        self._states.pop(rollout_id, None)
        self._leaving.discard(rollout_id)

    def _note_fault(self, task: asyncio.Task[None]) -> None:
        """A task that raised would otherwise end in silence, and the run wait for it until its deadline."""
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
            self._delivering.set()

    def _deliver(self, done: Trajectory | DroppedRollout) -> None:
        self._done.append(done)
        self._delivering.set()

    async def _send_reports(self) -> None:
        next_s = 0.0
        while True:
            await self._reporting.wait()
            await asyncio.sleep(max(REPORT_GATHER_S, next_s - time.monotonic()))
            next_s = time.monotonic() + REPORT_EVERY_S
            self._reporting.clear()
            outbox, self._outbox = self._outbox, _Outbox()
            try:
                await self._report(outbox)
            except UnknownReplica:  # `_take_grants` registers again, with what is resident
                continue

    async def _report(self, outbox: _Outbox) -> None:
        if outbox.turns or outbox.finished:
            await self._ask(
                self._balancer.report(self._replica_id, outbox.turns, outbox.finished, self.load()), "a report"
            )
        if outbox.returned:
            await self._ask(self._balancer.return_rollouts(self._replica_id, outbox.returned), "rollouts handed back")

    async def _end(self, died: EngineError) -> None:
        """The engine is gone: hand back every rollout at its last finished turn, then end, to be started anew."""
        if self._engine_died is not None:
            return
        self._engine_died = died
        for task in self._loops:
            task.cancel()
        items = [(rollout_load(state), state) for state in self._states.values()]
        with contextlib.suppress(Exception):  # the driver's `replica_lost` covers what does not arrive
            await self._ask(self._balancer.return_rollouts(self._replica_id, items), "rollouts handed back", 5.0)
        self._die()

    async def _ask(self, answer: Awaitable[Any], what: str, extra_s: float = 0.0) -> Any:
        return await within(answer, CALL_DEADLINE_S + extra_s, waiter=self._replica_id, owner="balancer", reason=what)


def rollout_load(state: RolloutState) -> RolloutLoad:
    """A rollout as the scheduler sees it."""
    request, prompt = state.request, len(state.prompt_ids)
    return RolloutLoad(
        rollout_id=request.rollout_id,
        group_id=request.group_id,
        prompt_tokens=prompt,
        max_response_tokens=max(1, min(request.limits.max_response_tokens, request.limits.max_context_tokens - prompt)),
        max_turns=request.limits.max_turns,
        context_tokens=prompt + len(state.response_ids),
        generated_tokens=sum(turn.num_tokens for turn in state.turns),
        turn=len(state.turns),
    )


class BalancerClient:
    """The balancer's address as `BalancerCalls`; while it restarts, calls are repeated for a while."""

    def __init__(self, balancer: Any) -> None:
        self._balancer = balancer

    async def register(
        self,
        replica_id: str,
        kv_capacity_tokens: int,
        max_running: int,
        policy_version: int,
        resident: Sequence[RolloutLoad],
    ) -> Any:
        return await self._call("register", replica_id, kv_capacity_tokens, max_running, policy_version, resident)

    async def report(
        self, replica_id: str, turn_reports: Sequence[TurnReport], finished: Sequence[Finished], load: ReplicaLoad
    ) -> Any:
        return await self._call("report", replica_id, turn_reports, finished, load)

    async def next_grants(self, replica_id: str, ack: int, wait_s: float) -> Any:
        return await self._call("next_grants", replica_id, ack, wait_s)

    async def return_rollouts(self, replica_id: str, items: Sequence[tuple[RolloutLoad, Any]]) -> Any:
        return await self._call("return_rollouts", replica_id, items)

    async def _call(self, method: str, *arguments: Any) -> Any:
        give_up_s = time.monotonic() + RESTART_PATIENCE_S
        while True:
            try:
                return await getattr(self._balancer, method).remote(*arguments)
            except ray.exceptions.ActorUnavailableError:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a generation actor builds its worker from."""

    replica_id: str
    engine: EngineSettings
    instruct: bool  # put the tool's schema and the answer format before the problem
    sandbox: SandboxConfig
    executors: tuple[str, ...]  # names, by which a restarted actor finds them again


class GenerationActor:
    """Ray's view of one `GenerationWorker`; every rule lives there."""

    def __init__(self, settings: WorkerSettings) -> None:
        from transformers import AutoTokenizer

        executors = {name: ray.get_actor(name) for name in settings.executors}
        tools = SandboxClient(executors, settings.sandbox, caller=settings.replica_id)
        self._name = settings.replica_id
        self._worker = GenerationWorker(
            settings.replica_id,
            engine=Engine(settings.engine),
            max_running=settings.engine.max_num_seqs,
            chat=TokenizerChat(AutoTokenizer.from_pretrained(settings.engine.model), instruct=settings.instruct),
            balancer=BalancerClient(ray.get_actor("balancer")),
            execute=tools.execute,
            verify=tools.verify,
        )

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> EngineFacts:
        return await self._worker.start()

    async def serve(self) -> None:
        await self._worker.serve()

    async def results(self) -> AsyncIterator[Any]:
        async for part in self._worker.results():
            yield part

    async def pull(self, policy_version: int, refs: Sequence[Any]) -> int:
        """Fetch the published buckets and serve them; each ref comes in a list, so that Ray hands on the ref itself."""
        buckets = await within(
            asyncio.gather(*(boxed[0] for boxed in refs)),
            CALL_DEADLINE_S,
            waiter=self._name,
            owner="object store",
            reason="weight buckets",
        )
        return await self._worker.pull(policy_version, buckets)

    async def record(self, refs: Sequence[Any], indices: Sequence[int], path: Path, stage: str, step: int) -> None:
        """Write the trajectories at these positions of the lists behind the refs (boxed, as in `pull`)."""
        lists = await within(
            asyncio.gather(*(boxed[0] for boxed in refs)),
            CALL_DEADLINE_S,
            waiter=self._name,
            owner="object store",
            reason="trajectories to record",
        )
        chosen = [batch[index] for batch, index in zip(lists, indices, strict=True)]
        await self._worker.record(chosen, path, stage=stage, step=step)

    async def timeline(self, rollouts: str) -> Timeline:
        return self._worker.timeline(rollouts)

    async def load(self) -> ReplicaLoad:
        return self._worker.load()

    async def pid(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        await self._worker.close()
