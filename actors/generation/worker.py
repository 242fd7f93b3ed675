"""A generation worker: one engine and the agent loops of its rollouts.

It polls the balancer for work, and reports finished turns in batches: while one report is sent, the next one is
collected. Finished rollouts wait for the driver's poll.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError

from actors.agents.agent_client import Agents
from actors.balancer_service import BalancerService
from actors.generation.engine import Engine, EngineFacts
from actors.generation.outbox import JournalWriter, Outbox, rollout_load
from actors.generation.replica_metrics import ReplicaMetrics
from actors.generation.rollout_traces import Activity
from actors.remote import AckedQueue, Batch, Remote
from actors.tool_client import Tools
from actors.weights.transfer import LoadedWeights
from rstar_ray.agent.agent_rollout import run_agent_rollout
from rstar_ray.agent.rollout import RolloutState, run_rollout, score
from rstar_ray.chat.template import ChatFormat
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, EngineError, SandboxError, ToolError, ToolStateLost, last_line
from rstar_ray.reward.judge import JudgeFn
from rstar_ray.rollouts import DroppedRollout
from rstar_ray.telemetry.meter import NO_METER
from rstar_ray.tools.environment import Reply
from rstar_ray.trajectory import Completion, StopReason, ToolCall, ToolMemory, ToolResult, Trajectory
from scheduler.records import (
    Cancel,
    Grant,
    Order,
    Quarantined,
    Registration,
    ReplicaLoad,
    UnknownReplica,
    in_flight_limit,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

ORDERS_WAIT_S = 20.0
"""Duration of one poll for orders."""
REPORT_GATHER_S = 0.002
"""Time in which finished turns are collected for one report."""
REPORT_EVERY_S = 0.02
"""Shortest time between two reports: a call to the balancer costs as much as a decode step."""
MAX_ROLLOUT_RESTARTS = 3
"""Most restarts of a rollout because a tool has lost its state."""
CALL_DEADLINE_S = 60.0
"""Longest wait for an answer of the balancer; the loops then repeat the call."""
LAST_WORDS_S = 5.0
"""Longest wait for the balancer before this process ends, and then for the driver."""
BROKEN = (MemoryError, OSError, DeadlineExceeded, RayError)
"""Failures of the worker or of something that its rollouts share; any other failure ends only one rollout."""
NO_THREAD = "can't start new thread"
"""Text of the `RuntimeError` that Python raises if there is no memory for a thread."""


@dataclass(slots=True)
class _Resident:
    """A rollout that this worker plays."""

    state: RolloutState  # at its last finished turn
    task: asyncio.Task[None]
    leaves: bool = False  # move it to another replica at its next turn boundary


class GenerationWorker:
    """Plays the rollouts that the balancer grants. One event loop; each rollout is one task."""

    def __init__(
        self,
        replica_id: str,
        *,
        engine: Engine,
        max_running: int,
        chat: ChatFormat,
        balancer: Remote[BalancerService],
        tools: Tools,
        agents: Agents | None = None,
        judge: JudgeFn,
        journal: JournalWriter | None = None,
        metrics: ReplicaMetrics | None = None,
        die: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._max_running = max_running
        self._chat = chat
        self._balancer = balancer
        self._tools = tools
        self._agents = agents
        self._judge = judge
        self._journal = journal or JournalWriter(None)
        self._die = die
        self._coming_up: asyncio.Future[EngineFacts] | None = None
        self._facts: EngineFacts | None = None
        self._residents: dict[str, _Resident] = {}
        self._outbox, self._unsent = Outbox(), Outbox()  # the second one is being sent, or was sent last
        self._reporting = asyncio.Event()
        self._metrics = metrics or ReplicaMetrics(replica_id, NO_METER)
        self._ended: AckedQueue[Trajectory | DroppedRollout] = AckedQueue()
        self._loops: list[asyncio.Task[None]] = []
        self._ends_by: Exception | None = None  # the cause for which this process is ending

    def __repr__(self) -> str:
        return self._replica_id

    async def start(self) -> EngineFacts:
        """Start the engine; repeated calls wait for the same start. Rollouts arrive after `serve`."""
        self._coming_up = self._coming_up or asyncio.ensure_future(self._engine.start())
        facts = await asyncio.shield(self._coming_up)
        self._facts = facts
        return facts

    async def serve(self) -> None:
        """Register with the balancer, with the resident rollouts, and take work until closed."""
        if self._loops:  # the driver took it for lost: `_follow_orders` registers again
            return
        with contextlib.suppress(DeadlineExceeded):  # `_follow_orders` registers when the balancer answers
            await self._register()
        loops = (self._follow_orders(), self._send_reports(), self._end_with_engine())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        for loop in self._loops:
            loop.add_done_callback(self._note_fault)

    async def take_finished(self, wait_s: float, acknowledged: int) -> Batch[Trajectory | DroppedRollout]:
        """Wait up to `wait_s` for the rollouts that end next; raises an error of this worker's loops."""
        return await self._ended.take(acknowledged, wait_s)

    async def swap(self, part: Awaitable[T]) -> T:
        """Run a part of a swap of weights; if the engine fails, this process ends."""
        try:
            done = await part
        except EngineError as died:
            if self._facts is not None:  # otherwise the engine is starting, and the call was meant for its predecessor
                await self._end(died)
            raise
        if isinstance(done, LoadedWeights):
            self._journal.serve(self._engine.policy_version, done.checksum)
        return done

    def load(self) -> ReplicaLoad:
        """The engine's load, for the balancer and for metrics."""
        return replace(self._engine.load(), at_tools=self._metrics.at_tools())

    async def close(self) -> None:
        tasks = [*self._loops, *(one.task for one in self._residents.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._journal.close()
        await self._engine.close()

    # -- work ---------------------------------------------------------------------------------------------------------
    async def _register(self) -> None:
        assert self._facts is not None, "start() comes before serve()"
        facts = self._facts

        def current_registration() -> Registration:
            return Registration(
                replica_id=self._replica_id,
                kv_capacity_tokens=facts.kv_capacity_tokens,
                max_running=in_flight_limit(self._max_running),
                block_tokens=facts.block_size,
                resident=tuple(rollout_load(one.state) for one in self._residents.values()),
                cost=facts.cost,
                preemptions=self._engine.load().preemptions,
            )

        # Built again at each try: a rollout that has ended since would stay in the balancer.
        for rollout_id in await self._ask(lambda b: b.register(current_registration()), "register"):
            self._cancel(rollout_id)

    async def _follow_orders(self) -> None:
        acknowledged = 0
        while True:
            try:
                orders = await self._next_orders(acknowledged)
            except UnknownReplica:  # the balancer restarted without state
                acknowledged = 0
                with contextlib.suppress(DeadlineExceeded):
                    await self._register()
                continue
            except DeadlineExceeded:  # the balancer is stuck: the watchdog kills it, and the engine continues
                continue
            acknowledged = orders.number
            for order in orders.items:
                match order:
                    case Grant():
                        self._metrics.granted(order)
                        self._begin(order)
                    case Cancel():
                        self._cancel(order.rollout_id)
                    case _:  # a move; the rollout may have ended meanwhile
                        if resident := self._residents.get(order.rollout_id):
                            resident.leaves = True

    async def _next_orders(self, acknowledged: int) -> Batch[Order]:
        return await self._ask(
            lambda b: b.next_orders(self._replica_id, acknowledged, ORDERS_WAIT_S), "orders", ORDERS_WAIT_S
        )

    def _begin(self, grant: Grant) -> None:
        state: RolloutState = grant.payload
        if grant.placement is not None:
            state = replace(state, placements=(*state.placements, grant.placement))
        rollout_id = state.request.rollout_id
        if rollout_id in self._residents:  # a grant delivered twice
            return
        task = asyncio.create_task(self._play(state))
        task.add_done_callback(self._note_fault)
        self._residents[rollout_id] = _Resident(state, task)

    def _cancel(self, rollout_id: str) -> None:
        if resident := self._residents.pop(rollout_id, None):
            resident.task.cancel()

    async def _play(self, state: RolloutState) -> None:
        """Play one rollout. A failure of only this rollout drops it; other failures end the worker."""
        rollout_id = state.request.rollout_id
        try:
            await self._played(state)
        except Exception as failed:
            met = failed.cause if isinstance(failed, RayTaskError) else failed
            if isinstance(met, BROKEN) or NO_THREAD in str(met):
                raise
            self._drop(self._reached(state), _named(rollout_id, met))

    async def _played(self, state: RolloutState) -> None:
        rollout_id = state.request.rollout_id

        async def generate(prompt_ids: Sequence[int], **asked: Any) -> Completion:
            sampling = self._engine.generate(prompt_ids, **asked)
            return await self._metrics.timed(Activity.GENERATE, rollout_id, sampling)

        tools = self._tools.open(state)
        plays = bool(state.request.problem.environment or self._tools.environment)

        async def execute(call: ToolCall) -> ToolResult:
            running = tools.execute(call, turn=len(self._reached(state).turns))
            return await self._metrics.timed(Activity.TOOL, rollout_id, running)

        async def converse(said: str) -> tuple[Reply, ToolMemory]:
            return await self._metrics.timed(Activity.TOOL, rollout_id, tools.converse(said))

        async def ended(reason: StopReason) -> tuple[float | None, ToolMemory]:
            return await self._metrics.timed(Activity.TOOL, rollout_id, tools.ended(reason))

        async def play() -> RolloutState:
            if self._agents is not None:
                agent = self._agents.open(state, lambda reply: self._metrics.timed(Activity.TOOL, rollout_id, reply))
                return await run_agent_rollout(
                    state, generate=generate, agent=agent, chat=self._chat, may_continue=self._turn_finished
                )
            return await run_rollout(
                state,
                generate=generate,
                execute=execute,
                chat=self._chat,
                converse=converse if plays else None,
                ended=ended if plays else None,
                may_continue=self._turn_finished,
            )

        moves = False
        try:
            state = await play()
            if state.stop_reason is None:
                moves = True
                self._hand_back(state)
                return
            self._note_turn(state)
            self._release(state)  # frees its KV cache for others before its answer is scored
            own_tools = self._agents is not None
            self._end_rollout(await score(state, self._judge, self._chat, own_tools=own_tools))
        except ToolStateLost as lost:
            reached = self._reached(state)
            if reached.restarts >= MAX_ROLLOUT_RESTARTS:
                self._drop(reached, f"tools: {lost}, {reached.restarts + 1} times")
            else:
                again = reached.restarted()
                self._journal.restarted(again)
                self._hand_back(again)
        except (SandboxError, ToolError) as failed:
            part = "sandbox" if isinstance(failed, SandboxError) else "tools"
            self._drop(self._reached(state), f"{part}: {failed}")
        except EngineError as died:
            moves = True
            await self._end(died)
        except asyncio.CancelledError:
            moves = self._ends_by is not None  # its next replica takes its tools over
            raise
        finally:
            if not moves:
                tools.close()
                if self._agents is not None:
                    self._agents.close(state)

    def _drop(self, state: RolloutState, reason: str) -> None:
        """End a rollout by a failure of ours: free its KV cache, and report the reason."""
        if state.request.rollout_id in self._residents:  # False if it failed while being scored
            self._release(state)
        self._end_rollout(
            DroppedRollout(rollout_id=state.request.rollout_id, group_id=state.request.group_id, reason=reason)
        )

    def _end_rollout(self, ended: Trajectory | DroppedRollout) -> None:
        self._metrics.ended(ended)
        self._ended.put(ended)

    def _turn_finished(self, state: RolloutState) -> bool:
        resident = self._note_turn(state)
        if resident is None or resident.leaves:
            return False
        self._outbox.turn_ended(state)
        self._reporting.set()
        return True

    def _note_turn(self, state: RolloutState) -> _Resident | None:
        """Record a finished turn; None for a rollout that was handed back because this process ends."""
        resident = self._residents.get(state.request.rollout_id)
        if resident is not None and resident.state is not state:
            self._journal.turn_finished(resident.state, state)
            resident.state = state
        return resident

    def _reached(self, start: RolloutState) -> RolloutState:
        """The rollout's state after its last finished turn."""
        resident = self._residents.get(start.request.rollout_id)
        return start if resident is None else resident.state

    def _release(self, state: RolloutState) -> None:
        self._residents.pop(state.request.rollout_id, None)
        self._outbox.turn_ended(state, ended=True)
        self._reporting.set()

    def _hand_back(self, state: RolloutState) -> None:
        self._residents.pop(state.request.rollout_id, None)
        self._outbox.hand_back(state)
        self._reporting.set()

    def _note_fault(self, task: asyncio.Task[None]) -> None:
        """Report the error of a task; otherwise the run would wait for it until its deadline."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._ended.close(fault)

    async def _send_reports(self) -> None:
        next_s = 0.0
        while True:
            await self._reporting.wait()
            await asyncio.sleep(max(REPORT_GATHER_S, next_s - time.monotonic()))
            next_s = time.monotonic() + REPORT_EVERY_S
            self._reporting.clear()
            outbox, self._outbox, self._unsent = self._outbox, Outbox(), self._outbox
            try:
                await self._journal.flush()
                await self._report(outbox)
            except UnknownReplica:  # `_follow_orders` registers again, with the resident rollouts
                continue
            except Quarantined as refused:
                await self._end(refused.cause if isinstance(refused, RayTaskError) else refused)
                return
            except DeadlineExceeded:  # send it with the next report
                self._outbox = self._outbox.after(outbox)
                self._reporting.set()

    async def _report(self, outbox: Outbox) -> None:
        """Raises `Quarantined` after the balancer has received everything."""
        quarantined: Quarantined | None = None
        if outbox.turns:
            turns = outbox.turns
            # Read again at each try: the balancer refuses a load that is older than the registration.
            try:
                await self._ask(lambda b: b.report(self._replica_id, turns, self.load()), "a report")
            except Quarantined as refused:
                quarantined = refused
            outbox.turns = []
        if back := [both for name, both in outbox.returned.items() if name not in self._residents]:  # not granted again
            await self._ask(lambda b: b.return_rollouts(self._replica_id, back), "rollouts handed back")
        if quarantined is not None:
            raise quarantined

    async def _end_with_engine(self) -> None:
        """Notice the engine's death also while no call waits for the engine."""
        try:
            await self._engine.until_dead()
        except EngineError as died:
            await self._end(died)

    async def _end(self, cause: Exception) -> None:
        """Hand back every rollout at its last finished turn, report the cause to the driver, then end this process,
        which Ray restarts.
        """
        if self._ends_by is not None:
            return
        self._ends_by = cause
        log.error(f"this worker ends: {cause}")
        for task in self._loops:
            if task is not asyncio.current_task():
                task.cancel()
        await self._journal.flush()
        for resident in [*self._residents.values()]:
            self._hand_back(resident.state)
            if resident.task is not asyncio.current_task():  # the engine may work, and another replica runs it now
                resident.task.cancel()
        with contextlib.suppress(Exception):  # the driver's `replica_lost` covers a report that does not arrive
            words = self._report(self._outbox.after(self._unsent))  # with ended rollouts, which must not be repeated
            await within(words, LAST_WORDS_S, waiter=self._replica_id, owner="balancer", reason="its last report")
        self._ended.close(cause)
        if self._loops:  # otherwise the driver does not read yet
            await asyncio.sleep(LAST_WORDS_S)  # the driver kills this process when it has received the cause
        self._die()

    async def _ask(self, ask: Callable[[BalancerService], Awaitable[T]], reason: str, extra_s: float = 0.0) -> T:
        return await self._balancer.call(ask, deadline_s=CALL_DEADLINE_S + extra_s, reason=reason, retry=True)


def _named(rollout_id: str, failed: BaseException) -> str:
    """Why a rollout is dropped because of a failure of ours."""
    name, cause = type(failed).__name__, last_line(failed)
    return f"rollout {rollout_id}: {name}" + (f": {cause}" if cause != name else "")
