"""A pool of isolated processes that run programs.

    async with SandboxPool(SandboxConfig()) as pool:
        result = await pool.run(ExecutionRequest(code="1 + 1"))

One event loop owns a pool. Every accepted call ends in exactly one result or one `SandboxError`. A call whose worker
dies is repeated in another worker, so a program may run twice, but has one result.
"""

import asyncio
import contextlib
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from rstar_ray.config import SandboxConfig
from rstar_ray.errors import (
    InterpreterFailed,
    SandboxClosed,
    SandboxError,
    SandboxFull,
    SandboxLate,
    SandboxLost,
    SandboxSlow,
)
from rstar_ray.outcome import Outcome
from sandbox.call import NOTHING, Call, Waiting, message_for, preload_set_for, refusal
from sandbox.cgroups import Groups
from sandbox.isolation import (
    INTERPRETER_HINT,
    SCRATCH_BYTES,
    SLOW_HINT,
    IsolationLevel,
    IsolationReport,
    fix_for,
    levels_of,
    read_host,
)
from sandbox.jail import wire
from sandbox.limits import patience_s
from sandbox.outcomes import TREE_OUT_OF_MEMORY, read_result
from sandbox.pool_metrics import PoolStats
from sandbox.processes import WorkerHandle
from sandbox.request import ExecutionRequest, ExecutionResult
from sandbox.self_test import attack
from sandbox.worker_groups import WorkerGroup, WorkerGroups
from sandbox.workspaces import Workspaces


class SandboxPool:
    """Runs programs in kernel jails on this machine, `slots` at a time."""

    def __init__(
        self,
        config: SandboxConfig,
        groups: Groups | None = None,
        *,
        levels: Sequence[IsolationLevel] = (),
        python: str = sys.executable,
    ) -> None:
        """`levels`: tried in this order; default: those of the settings. `python`: interpreter of the programs."""
        self.config = config
        self._levels = tuple(levels) or levels_of(config)
        self._python = python
        self._groups = groups  # None: use groups that are delegated to this process
        self._slots = self.config.slots or len(os.sched_getaffinity(0))
        self._level = self._levels[0]
        self._report: IsolationReport | None = None
        self._workspaces: Workspaces | None = None
        self._worker_groups: WorkerGroups | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._next_call = 0
        self._running = 0
        self._waiting = Waiting()
        self._open = False
        self._idle_event = asyncio.Event()
        self._finished: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._seconds = {"waiting": 0.0, "running": 0.0, "timed_out": 0.0}

    # Life

    async def __aenter__(self) -> "SandboxPool":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def report(self) -> IsolationReport:
        """The level of isolation; only after `start`."""
        if self._report is None:
            raise SandboxClosed("the pool has not started")
        return self._report

    async def start(self) -> IsolationReport:
        """Start servers and workers and test the jail; returns the level of isolation.

        Raises SandboxError, with the reason and a fix, if no accepted level works.
        """
        workspaces = self._workspaces = Workspaces(self._groups)
        declined: list[str] = []
        for level in self._levels:
            groups = self._groups_at(level, workspaces)
            try:
                self._report = await self._try_level(groups, workspaces)
            except (SandboxSlow, InterpreterFailed) as error:  # not a fault of the level
                self._stop_everything()
                await workspaces.close()
                hint = SLOW_HINT if isinstance(error, SandboxSlow) else INTERPRETER_HINT
                raise SandboxError(f"the sandbox does not start: {error}. {hint}.") from error
            except SandboxError as error:
                declined.append(f"{level}: {error}")
                self._stop_everything()
                continue
            self._supervisor = asyncio.create_task(groups.supervise(), name="sandbox supervisor")
            for name in self.config.warm:
                groups[name]
            return self._report
        best = await self._best_below(self._levels[-1], workspaces)
        await workspaces.close()
        problem = f"the sandbox does not start: {'; '.join(declined)}. {fix_for(self._levels[0], read_host())}"
        raise SandboxError(f"{problem} The best level that works here is {best}.")

    async def _best_below(self, level: IsolationLevel, workspaces: Workspaces) -> IsolationLevel:
        """The best working level below one that does not work; tested by a start."""
        if level is not IsolationLevel.NAMESPACES:
            return IsolationLevel.PROCESS
        try:
            return (await self._try_level(self._groups_at(IsolationLevel.LANDLOCK, workspaces), workspaces)).level
        except SandboxError:
            return IsolationLevel.PROCESS
        finally:
            self._stop_everything()

    def _groups_at(self, level: IsolationLevel, workspaces: Workspaces) -> WorkerGroups:
        self._level = level
        self._worker_groups = WorkerGroups(self, self.config, self._slots, level, workspaces, self._python)
        return self._worker_groups

    async def _try_level(self, groups: WorkerGroups, workspaces: Workspaces) -> IsolationReport:
        """Start the lean server and attack its jail. Raises SandboxError with the reason."""
        first = await groups.first_worker()
        self._open = True
        facts = {"cgroup": workspaces.groups.description} | first.facts
        if groups.level is IsolationLevel.PROCESS:
            return IsolationReport(level=groups.level, facts=facts)
        return IsolationReport(level=groups.level, facts=facts, contained=await attack(self.run))

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new calls, wait up to `drain_s` for accepted ones, end all processes."""
        self._open = False
        if drain_s > 0 and (self._running or self._waiting.calls):
            self._idle_event.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle_event.wait(), drain_s)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        self._stop_everything()
        if self._workspaces is not None:
            await self._workspaces.close()
            self._workspaces = None

    def _stop_everything(self) -> None:
        self._open = False
        for group in self._worker_groups.close() if self._worker_groups is not None else ():
            for worker in group.workers:
                if worker.call is not None:
                    self._fail(worker.call, SandboxClosed("the pool closed before the program ended"))
            while group.queue:
                self._fail(group.queue.pop(), SandboxClosed("the pool closed before the program started"))
        self._running = 0
        self._idle_event.set()

    # Calls

    async def run(
        self, request: ExecutionRequest, caller: str = "", *, deadline_s: float | None = None
    ) -> ExecutionResult:
        """Run one program; `caller` shares the pool fairly with others.

        `deadline_s` (seconds) bounds the whole call, queue included (default: the pool's), but never below 1.1 times
        the program's wall time limit. Cancelling the call ends the program. Raises SandboxFull, SandboxLate,
        SandboxLost or SandboxClosed.
        """
        return await self.submit(request, caller, deadline_s=deadline_s)

    def submit(
        self, request: ExecutionRequest, caller: str = "", *, deadline_s: float | None = None
    ) -> asyncio.Future[ExecutionResult]:
        """Like `run`, but returns a future, which may be cancelled. Raises like `run`."""
        if not self._open or self._worker_groups is None:
            raise SandboxClosed("the pool is closed")
        if full := self._waiting.refusal(request, self.config.max_waiting):
            self._counts["refused"] += 1
            raise SandboxFull(full)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ExecutionResult] = loop.create_future()
        invalid = refusal(request, self._level)
        if invalid:
            self._counts["accepted"] += 1
            self._finished[Outcome.INVALID] += 1
            result = ExecutionResult(outcome=Outcome.INVALID, reason=invalid, stderr=invalid, call_id=request.call_id)
            answer.set_result(result)
            return answer
        group = self._worker_groups.for_call(preload_set_for(request))
        self._next_call += 1
        call = Call(request, caller, self._next_call, answer, time.monotonic())
        limit = patience_s(request.limits, self.config.deadline_s if deadline_s is None else deadline_s)
        timer = loop.call_later(limit, self._fail, call, SandboxLate(f"no answer within {limit:g} s, queue included"))
        answer.add_done_callback(lambda _: self._settle(call, timer))
        self._counts["accepted"] += 1
        self._waiting.enter(call)
        group.queue.push(caller, call)
        self.workers_are_idle()
        return answer

    def _settle(self, call: Call, timer: asyncio.TimerHandle) -> None:
        """End the program of a call that has ended for any reason."""
        timer.cancel()
        if call.worker is not None:
            call.worker.say(wire.CANCEL)  # nothing waits for its result
        elif call.started_at == 0.0:
            self._waiting.leave(call)
        call.request = NOTHING  # frees its text: the call may stay in a queue for a while
        self._note_idle()

    def _fail(self, call: Call, error: SandboxError) -> None:
        if not call.answer.done():
            self._counts["failed"] += 1
            call.answer.set_exception(error)

    def _give(self, group: WorkerGroup, worker: WorkerHandle, call: Call) -> None:
        message, code, stdin = message_for(call.request, call.number)
        if call.started_at == 0.0:
            self._waiting.leave(call)
            call.started_at = time.monotonic()
            self._seconds["waiting"] += call.started_at - call.waiting_since
        self._running += 1
        call.attempts += 1
        call.worker, worker.call = worker, call
        worker.calls += 1
        if message.flags & wire.PROCESSES_ALLOWED and self._workspaces is not None:
            self._workspaces.groups.bound(worker.number, message.memory_bytes + SCRATCH_BYTES)
        worker.last_heard = asyncio.get_running_loop().time()
        try:
            worker.send(message, code, stdin)
        except OSError:
            assert self._worker_groups is not None
            self._worker_groups.lose(group, worker, "the program could not be sent")

    # Events of the groups

    def workers_are_idle(self) -> None:
        """Give waiting calls, the oldest first, to idle workers."""
        while self._worker_groups is not None and self._running < self._slots:
            ready = [group for group in self._worker_groups.everyone() if group.idle and group.queue]
            if not ready:
                return
            group = min(ready, key=_oldest)
            call = group.queue.pop()
            if not call.answer.done():
                self._give(group, group.idle.pop(), call)

    def program_ended(self, group: WorkerGroup, worker: WorkerHandle, payload: memoryview) -> None:
        """Process a worker's report of a program's end."""
        assert self._worker_groups is not None
        call = worker.call
        try:
            seen = wire.unpack_result(payload)
            if call is None or seen.call_id != call.number:
                raise ValueError("result of an unknown call")
            result = None if call.answer.done() else read_result(call.request, payload)
        except (struct.error, ValueError):
            self._worker_groups.lose(group, worker, "malformed result")
            return
        worker.call = call.worker = None
        self._running -= 1
        spent = time.monotonic() - call.started_at
        self._seconds["running"] += spent
        if result is not None:
            if (
                result.outcome is Outcome.KILLED
                and self._workspaces is not None
                and self._workspaces.groups.ran_out(worker.number)
            ):
                result = replace(result, outcome=Outcome.OUT_OF_MEMORY, reason=TREE_OUT_OF_MEMORY)
            self._finished[result.outcome] += 1
            if result.outcome is Outcome.TIMEOUT:
                self._seconds["timed_out"] += spent
            call.answer.set_result(result)
        if seen.flags & wire.RETIRE or worker.calls >= self.config.calls_per_worker:
            self._worker_groups.replace(group, worker)
        else:
            self._worker_groups.rest(group, worker)
        self._note_idle()

    def call_lost_its_worker(self, group: WorkerGroup, call: Call) -> None:
        """Give the call to another worker, up to the configured number of attempts."""
        self._running -= 1
        if call.answer.done():
            pass
        elif call.attempts >= self.config.attempts:
            self._fail(call, SandboxLost(f"{call.attempts} workers were lost under this call"))
        else:
            self._counts["retried"] += 1
            call.waiting_since, call.started_at = time.monotonic(), 0.0
            self._waiting.enter(call)
            group.queue.push_front(call.caller, call)
        self._note_idle()

    def no_server(self, group: WorkerGroup) -> None:
        """Fail the calls that wait for a group without a server."""
        while group.queue:
            self._fail(group.queue.pop(), SandboxError(f"no {group.name} server: {group.reason}"))

    # Facts

    def _note_idle(self) -> None:
        if not self._running and not self._waiting.calls:
            self._idle_event.set()

    @property
    def max_descriptors(self) -> int:
        """Descriptors that the pool holds when all kinds of servers and workers run: two for each process."""
        num_kinds = len(self.config.warm) + 1  # with the server that compares answers
        return 2 * num_kinds * (self._slots + self.config.spare_workers + 2)  # a server and its successor

    @property
    def server_ids(self) -> tuple[int, ...]:
        """Process ids of the warm servers."""
        groups = self._worker_groups.everyone() if self._worker_groups is not None else []
        return tuple(group.server.pid for group in groups if group.server is not None)

    def stats(self) -> PoolStats:
        """Counts and sums since the start."""
        groups = self._worker_groups.everyone() if self._worker_groups is not None else []
        lost = self._worker_groups.counts if self._worker_groups is not None else Counter[str]()
        return PoolStats(
            level=str(self._level),
            slots=self._slots,
            running=self._running,
            waiting=self._waiting.calls,
            accepted=self._counts["accepted"],
            refused=self._counts["refused"],
            finished=dict(self._finished),
            failed=self._counts["failed"],
            retried=self._counts["retried"],
            workers_replaced=lost["workers_replaced"],
            workers_lost=lost["workers_lost"],
            servers_lost=lost["servers_lost"],
            waiting_s=self._seconds["waiting"],
            running_s=self._seconds["running"],
            timed_out_s=self._seconds["timed_out"],
            servers_memory_bytes=sum(group.server.memory_bytes for group in groups if group.server is not None),
        )


def _oldest(group: WorkerGroup) -> int:
    return group.queue.first().number
