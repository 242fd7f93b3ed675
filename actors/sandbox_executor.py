"""Ray's side of the sandbox: executors that own a pool, and the client that spreads calls over them.

Calls leave in batches of up to 64, or of those gathered in two milliseconds. Results return one by one as they
finish, so that a slow program does not delay others. A call whose executor died is repeated on another one.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayError

from actors.cluster.ray_metrics import ray_meter
from actors.health.heartbeat import Heartbeat, heartbeat
from actors.remote import MAX_TRIES, Remote
from actors.service import ServiceActor
from rstar_ray.config import SandboxConfig
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, SandboxError, first_line
from rstar_ray.outcome import Outcome
from rstar_ray.telemetry.registry import Kind
from rstar_ray.trajectory import ToolCall, ToolResult
from sandbox.equality import equal_expressions
from sandbox.limits import patience_s, program_limits, tool_limits
from sandbox.outcomes import tool_text
from sandbox.pool import SandboxPool
from sandbox.pool_metrics import PoolStats, lost_since, pool_figures
from sandbox.request import ExecutionRequest, ExecutionResult

log = logging.getLogger(__name__)

MAX_BATCH_CALLS = 64
GATHER_S = 0.002
STREAM_SHARE = 0.5
"""Share of a call's deadline: an executor that stays silent for so long, and longer than any of its programs
may take, leaves time for another try.
"""
JUDGED_OUTPUT_CHARS = 65_536
"""Most stored output of a judged program; a longer ground truth cannot be met."""
REST_S = 5.0
REST_SHARE = 0.1
"""How long an executor that failed, or failed a call, gets no calls; at most a share of the call's deadline, so
that there is time for every try.
"""
ASK_AGAIN_S = 0.5
COMPARISONS = "verify"
"""Comparisons of answers share a pool as one caller, so that they do not delay rollouts."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The executor could not run a call; says nothing about the program."""

    reason: str


Answer = ExecutionResult | Failure


class SandboxExecutor(ServiceActor):
    """The actor of one sandbox pool; all rules are in sandbox/."""

    def __init__(self, name: str, config: SandboxConfig, run: str = "") -> None:
        super().__init__(name)
        self._meter = ray_meter(run)
        self._pool = SandboxPool(config)
        self._starting: asyncio.Task[Any] | None = None
        self._num_answered = 0
        self._reported: PoolStats | None = None  # with the heartbeat before

    def probe(self) -> Heartbeat:
        """For the watchdog; exports the pool's metrics as well."""
        stats = self._pool.stats()
        with self._meter.guarded():
            for metric, value, labels in pool_figures(stats):
                put = self._meter.reached if metric.kind is Kind.COUNTER else self._meter.set
                put(metric.exported_name, value, executor=self._name, **labels)
        before, self._reported = self._reported, stats
        for line in lost_since(before, stats):
            log.warning(line)
        return heartbeat(progress=self._num_answered, children=self._pool.server_ids)

    async def start(self) -> str:
        """Start the pool, once, or again where it did not come up; returns the isolation level it achieved."""
        if self._starting is None or _failed(self._starting):
            self._starting = asyncio.create_task(self._pool.start())
        return str((await asyncio.shield(self._starting)).level)

    async def run(
        self, batch: Sequence[tuple[int, ExecutionRequest]], caller: str
    ) -> AsyncIterator[list[tuple[int, Answer]]]:
        """Answers by number as they finish; those that finish together are sent together."""
        await self.start()  # an actor that Ray has restarted did not start its pool
        finished: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()

        async def answer(number: int, request: ExecutionRequest) -> None:
            finished.put_nowait((number, await self._answer(request, caller)))

        tasks = [asyncio.create_task(answer(number, request)) for number, request in batch]
        left = len(tasks)
        while left:
            ready = [await finished.get()]
            while not finished.empty():
                ready.append(finished.get_nowait())
            left -= len(ready)
            self._num_answered += len(ready)
            yield ready

    async def stats(self) -> Any:
        return self._pool.stats()

    async def close(self) -> None:
        await self._pool.close()

    async def _answer(self, request: ExecutionRequest, caller: str) -> Answer:
        share = COMPARISONS if request.trusted else caller
        try:
            return await self._pool.run(request, share)
        except Exception as failed:  # any failure here is ours, and the caller needs an answer
            return Failure(f"{type(failed).__name__}: {failed}")


@dataclass(slots=True)
class _Executor:
    """This client's view of one executor."""

    actor: Remote[SandboxExecutor]
    outstanding: int = 0
    rests_until_s: float = 0.0

    @property
    def name(self) -> str:
        return self.actor.name


@dataclass(slots=True)
class _Call:
    request: ExecutionRequest
    done: asyncio.Future[ExecutionResult]
    tries: int = 0
    tried: set[str] = field(default_factory=set)


class SandboxClient:
    """The tool and the comparisons for agent loops: picks the least loaded executor, batches, retries elsewhere."""

    def __init__(
        self,
        executors: Sequence[Remote[SandboxExecutor]],
        config: SandboxConfig,
        *,
        caller: str,
    ) -> None:
        self._executors = [_Executor(actor) for actor in executors]
        self._config = config
        self._caller = caller
        self._limits = program_limits(config)
        self._rest_s = min(REST_S, config.deadline_s * REST_SHARE)
        self._gathering: list[_Call] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def execute(self, call: ToolCall, *, seed: int | None = None) -> ToolResult:
        """Run one tool call; without `seed` the kernel seeds its random generators.

        Raises `SandboxError` where our side failed on every try.
        """
        started_s = time.monotonic()
        request = ExecutionRequest(code=call.code, stdin=call.stdin, limits=self._limits, seed=seed)
        result = await self._result(request)
        return ToolResult(outcome=result.outcome, text=tool_text(result), wall_s=time.monotonic() - started_s)

    async def run_tool(
        self, program: str, stdin: str, *, deadline_s: float, max_chars: int, seed: int | None = None
    ) -> ToolResult:
        """Run a tool's own program on the arguments in `stdin`. Raises as `execute`."""
        started_s = time.monotonic()
        limits = tool_limits(self._limits, deadline_s, max_chars)
        result = await self._result(ExecutionRequest(code=program, stdin=stdin, limits=limits, seed=seed))
        return ToolResult(outcome=result.outcome, text=tool_text(result), wall_s=time.monotonic() - started_s)

    async def compare(self, pairs: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """Whether each (answer, truth) is equal, by math-verify in the sandbox.

        Raises `JudgeError` where the comparison hung or crashed, `SandboxError` as `execute`.
        """
        return await equal_expressions(self._result, pairs)

    async def run_program(self, code: str, stdin: str) -> tuple[Outcome, str]:
        """Outcome and stdout of a judged program, with room for what such programs print. Raises as `execute`."""
        limits = replace(self._limits, stdout_chars=JUDGED_OUTPUT_CHARS)
        result = await self._result(ExecutionRequest(code=code, stdin=stdin, limits=limits, seed=0))
        return result.outcome, result.stdout

    async def _result(self, request: ExecutionRequest) -> ExecutionResult:
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._add(call)
        try:
            return await within(
                call.done,
                patience_s(request.limits, self._config.deadline_s),
                waiter=self._caller,
                owner="sandbox",
                reason="a comparison" if request.trusted else "a program",
            )
        except DeadlineExceeded as late:
            raise SandboxError(str(late)) from late

    def _add(self, call: _Call) -> None:
        self._gathering.append(call)
        if len(self._gathering) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self._send)
        elif len(self._gathering) >= MAX_BATCH_CALLS:
            self._send()

    def _send(self) -> None:
        if not self._gathering:
            return
        calls, self._gathering = self._gathering, []
        shares: dict[str, list[_Call]] = {}
        for call in calls:
            executor = self._least_loaded(call)
            executor.outstanding += 1
            call.tries += 1
            call.tried.add(executor.name)
            shares.setdefault(executor.name, []).append(call)
        for executor in self._executors:
            if share := shares.get(executor.name):
                task = asyncio.create_task(self._run(executor, share))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _least_loaded(self, call: _Call) -> _Executor:
        """The executor with the fewest open calls; one that failed lately, or failed this call, only if there
        is no other.
        """
        now = time.monotonic()
        return min(
            self._executors, key=lambda e: (e.name in call.tried, e.rests_until_s > now, e.outstanding, e.rests_until_s)
        )

    async def _run(self, executor: _Executor, calls: list[_Call]) -> None:
        waiting = {next(self._numbers): call for call in calls}
        batch = [(number, call.request) for number, call in waiting.items()]
        try:
            stream = executor.actor.methods(num_returns="streaming").run(batch, self._caller)
            while waiting:
                share_s = self._config.deadline_s * STREAM_SHARE
                answers = await within(
                    _next_answers(stream),
                    max(patience_s(call.request.limits, share_s) for call in waiting.values()),
                    waiter=self._caller,
                    owner=executor.name,
                    reason=f"{len(waiting)} calls",
                )
                for number, answer in answers:
                    call = waiting.pop(number, None)
                    if call is None:  # answered before, or never sent
                        continue
                    executor.outstanding -= 1
                    if isinstance(answer, ExecutionResult):
                        _settle(call.done, answer)
                    else:
                        # An executor that fails at once is the least loaded one, and would attract all calls.
                        executor.rests_until_s = time.monotonic() + self._rest_s
                        reason = answer.reason if isinstance(answer, Failure) else f"invalid answer {answer!r:.80}"
                        self._again(call, f"{executor.name}: {reason}")
        except Exception as lost:  # the actor died or took too long: retry on another one
            if isinstance(lost, DeadlineExceeded):  # alive, so nothing else reports it
                log.warning(f"{executor.name}: {len(waiting)} calls unanswered for {lost.seconds:g} s; retrying")
            executor.rests_until_s = time.monotonic() + self._rest_s
            executor.outstanding -= len(waiting)
            if self._all_rest_s() > 0:
                await self._until_there(executor)  # no other executor: Ray may be restarting this one
            for call in waiting.values():
                self._again(call, f"{executor.name}: {first_line(lost)}")

    async def _until_there(self, executor: _Executor) -> None:
        """Wait until it answers, so that no try is spent on one that is starting; the calls' deadlines continue."""

        with contextlib.suppress(RayError, DeadlineExceeded):
            await executor.actor.call(
                lambda e: e.start(), deadline_s=self._config.deadline_s, reason="its start", retry=True
            )
            executor.rests_until_s = 0.0

    def _all_rest_s(self) -> float:
        """Time until the first of them may get calls again; 0 where one has not failed lately."""
        return max(0.0, min(executor.rests_until_s for executor in self._executors) - time.monotonic())

    def _again(self, call: _Call, reason: str) -> None:
        """Retry on another executor at once. Where all have failed lately, retry after a moment, and the last
        time after a pause: the fault may be temporary.
        """
        if call.tries < MAX_TRIES:
            last = call.tries == MAX_TRIES - 1
            wait_s = min(self._all_rest_s(), self._rest_s if last else ASK_AGAIN_S)
            asyncio.get_running_loop().call_later(wait_s, self._add_unless_ended, call)
        elif not call.done.done():
            call.done.set_exception(SandboxError(f"failed {MAX_TRIES} times, last on {reason}"))

    def _add_unless_ended(self, call: _Call) -> None:
        if not call.done.done():
            self._add(call)


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _next_answers(stream: Any) -> list[tuple[int, object]]:
    return await (await anext(stream))


def _settle(done: asyncio.Future[ExecutionResult], answer: ExecutionResult) -> None:
    if not done.done():  # the rollout may have been cancelled meanwhile
        done.set_result(answer)
