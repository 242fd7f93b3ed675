"""The calls of a front: each goes to a worker that serves, and to another where that one is lost.

A call waits here until a worker has a core for it, so little is lost with one. Every call has an id of ours: where a
connection breaks it is asked for again at the same worker, which runs it once. Only where the worker itself is lost
does a program run elsewhere, and so perhaps twice; its result is told once.
"""

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgpack

from rstar_ray.errors import SandboxError
from sandbox.errors import SandboxClosed, SandboxFull, SandboxLate, SandboxLost
from sandbox.fair_queue import FairQueue
from sandbox.http.codec import request_to_data
from sandbox.http.link import Busy, Gone, LinkTrouble, Refused, Silent
from sandbox.http.roster import Patience, Roster, State, Worker
from sandbox.isolation import IsolationLevel
from sandbox.limits import MIB, Limits
from sandbox.request import ExecutionRequest, ExecutionResult

_log = logging.getLogger(__name__)

MAX_HELD_BYTES = 1024 * MIB  # of the programs and inputs of all calls


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """How many calls there may be, and who runs them."""

    levels: Collection[IsolationLevel]  # at which a worker may run programs
    queue_size: int  # calls waiting at most
    most_under_way: int  # calls at workers at once, which take a descriptor each
    longest_s: float  # by the clock, that a program of any client may take
    patience: Patience


@dataclass(slots=True, eq=False)
class _Call:
    """One accepted call; its program is kept packed."""

    sent_id: str
    own_id: str
    body: bytes
    limits: Limits
    caller: str
    answer: asyncio.Future[ExecutionResult]
    accepted_at: float
    started_at: float = 0.0  # 0.0: it waits
    lost: list[str] = field(default_factory=list[str])  # workers that were lost under it, and how
    refused_by: set[str] = field(default_factory=set[str])


class Fleet:
    """Runs programs on workers; to those who call it is as a pool."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._patience = config.patience
        self.roster = Roster(config.levels, config.patience, self._give)
        self._queue: FairQueue[_Call] = FairQueue()
        self._held_bytes = 0
        self._open = False  # for more calls
        self._closed = False
        self._watching: asyncio.Task[None] | None = None
        self._served_at = 0.0
        self.waiting = 0
        self.under_way = 0
        self.counts: Counter[str] = Counter()  # accepted, refused, failed, retried
        self.finished: Counter[str] = Counter()  # results by outcome

    async def __aenter__(self) -> "Fleet":
        self._open, self._served_at = True, time.monotonic()
        self._watching = asyncio.create_task(self._watch(), name="calls without a worker")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Tell those who wait that it closes, and forget the workers; safe to call twice."""
        self._open, self._closed = False, True
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self._fail_waiting(SandboxClosed("the front closes"))
        await self.roster.close()

    async def drain(self, drain_s: float) -> None:
        """Take no more calls, and wait so long for those accepted."""
        self._open = False
        end = time.monotonic() + drain_s
        while (self.waiting or self.under_way) and time.monotonic() < end:
            await asyncio.sleep(0.05)

    def submit(
        self, request: ExecutionRequest, caller: str = "", *, deadline_s: float
    ) -> asyncio.Future[ExecutionResult]:
        """Accept a call; `deadline_s` bounds the whole of it, the wait included. Raises SandboxError."""
        if not self._open:
            raise SandboxClosed("the front closes")
        if self._alone():
            raise SandboxError(self._nobody())
        sent_id = uuid.uuid4().hex
        body = msgpack.packb(request_to_data(replace(request, call_id=sent_id)), unicode_errors="surrogatepass")
        assert isinstance(body, bytes)
        if self.waiting >= self._config.queue_size or self._held_bytes + 2 * len(body) > MAX_HELD_BYTES:
            self.counts["refused"] += 1
            raise SandboxFull(f"{self.waiting} calls wait already; the front holds no more")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ExecutionResult] = loop.create_future()
        call = _Call(sent_id, request.call_id, body, request.limits, caller, answer, time.monotonic())
        timer = loop.call_later(deadline_s, self._late, call, deadline_s)
        answer.add_done_callback(lambda _: self._settle(call, timer))
        self.counts["accepted"] += 1
        self.waiting += 1
        self._held_bytes += 2 * len(body)  # packed, and as it came
        self._queue.push(caller, call)
        self._give()
        return answer

    async def run(self, request: ExecutionRequest, caller: str = "", *, deadline_s: float) -> ExecutionResult:
        """As `submit`, and wait for the result."""
        return await self.submit(request, caller, deadline_s=deadline_s)

    def _settle(self, call: _Call, timer: asyncio.TimerHandle) -> None:
        """The call has ended; a worker that has its program finishes it, and keeps its place until then."""
        timer.cancel()
        self._held_bytes -= 2 * len(call.body)
        if call.started_at == 0.0:
            self.waiting -= 1
            call.body = b""  # it may stand in the queue for a while yet

    def _late(self, call: _Call, deadline_s: float) -> None:
        missing = self.roster.missing()
        told = f"no answer within {deadline_s:g} s, queue included" + (f"; missing: {missing}" if missing else "")
        self._fail(call, SandboxLate(told))

    def _fail(self, call: _Call, error: SandboxError) -> None:
        if not call.answer.done():
            self.counts["failed"] += 1
            call.answer.set_exception(error)

    # Giving

    def _give(self) -> None:
        """Give waiting calls, callers in turn, to the workers with most room."""
        while self._queue:
            call = self._queue.first()
            if call.answer.done():
                self._queue.pop()
                continue
            worker = self._choose()
            if worker is None:
                return
            self._queue.pop()
            self._start(call, worker)

    def _choose(self) -> Worker | None:
        now = time.monotonic()
        able = [each for each in self.roster.serving() if each.room > 0 and each.busy_until <= now]
        if not able or self.under_way >= self._config.most_under_way:
            return None
        return max(able, key=lambda each: each.room / each.slots)

    def _start(self, call: _Call, worker: Worker) -> None:
        if call.started_at == 0.0:
            call.started_at = time.monotonic()
            self.waiting -= 1
        self.under_way += 1
        task = asyncio.create_task(self._attempt(call, worker))
        worker.calls.add(task)
        task.add_done_callback(lambda _: self._ended(call, worker, task))

    def _ended(self, call: _Call, worker: Worker, task: asyncio.Task[None]) -> None:
        self.under_way -= 1
        worker.calls.discard(task)
        if task.cancelled():  # the worker was set aside, perhaps before it was asked
            self._lost(call, worker)
        elif (fault := task.exception()) is not None:
            _log.error("a call to %s failed", worker.address, exc_info=fault)
            self._fail(call, SandboxError(f"the front has a fault: {type(fault).__name__}"))
        self.roster.call_ended(worker)
        self._give()

    async def _attempt(self, call: _Call, worker: Worker) -> None:
        """One call at one worker: its result, or what becomes of it without one."""
        try:
            result = await self._ask(call, worker)
        except Busy:
            worker.busy_until = time.monotonic() + self._patience.busy_s
            asyncio.get_running_loop().call_later(self._patience.busy_s, self._give)
            self._wait_again(call)
        except Refused as refusal:
            call.refused_by.add(worker.address)
            self._elsewhere(call, f"{worker.address} refuses the call: {refusal}")
        except LinkTrouble as trouble:
            self.roster.set_aside(worker, str(trouble))
            self._lost(call, worker)
        else:
            worker.heard_at, worker.faults = time.monotonic(), 0
            worker.answered += 1
            if not call.answer.done():
                self.finished[result.outcome] += 1
                call.answer.set_result(replace(result, call_id=call.own_id))

    async def _ask(self, call: _Call, worker: Worker) -> ExecutionResult:
        """Ask until there is an answer: the worker knows the call by its id. Raises LinkTrouble."""
        wait_s = call.limits.wall_s + self._config.longest_s + self._patience.grace_s
        end = time.monotonic() + wait_s
        for broken in itertools.count(1):
            try:
                left_s = end - time.monotonic()
                return await worker.link.execute(call.body, call.sent_id, call.limits, left_s)
            except Silent as silent:
                if time.monotonic() >= end:
                    raise Gone(f"it has not answered a call within {wait_s:.3g} s") from silent
                if broken > self._patience.reconnections:
                    raise Gone(f"connections to it break: {silent}") from silent
            await asyncio.sleep(self._patience.retry_s * 2**broken)
        raise AssertionError("a loop without an end has ended")

    def _lost(self, call: _Call, worker: Worker) -> None:
        call.lost.append(f"{worker.address} ({worker.why or worker.state})")
        if self._closed:
            self._fail(call, SandboxClosed("the front closes"))
        elif len(call.lost) >= self._patience.attempts:
            self._fail(call, SandboxLost(f"workers were lost under this call: {', '.join(call.lost)}"))
        else:
            self.counts["retried"] += 1
            self._wait_again(call)

    def _wait_again(self, call: _Call) -> None:
        if not call.answer.done():
            self.waiting += 1
            call.started_at = 0.0
            self._queue.push_front(call.caller, call)

    def _elsewhere(self, call: _Call, why: str) -> None:
        """Ask one that has not refused it, at once; where there is none, the refusal is the answer."""
        others = [worker for worker in self.roster.serving() if worker.address not in call.refused_by]
        if call.answer.done():
            return
        if others and len(call.refused_by) < self._patience.attempts:
            self._start(call, max(others, key=lambda each: each.room))
        else:
            self._fail(call, SandboxError(why))

    # Without a worker

    def _alone(self) -> bool:
        """True where nobody has served for too long."""
        now = time.monotonic()
        if any(worker.state in (State.SERVING, State.LEAVING) for worker in self.roster):
            self._served_at = now
        return now - self._served_at > self._patience.alone_s

    def _nobody(self) -> str:
        return f"no worker serves; missing: {self.roster.missing() or 'none has joined'}"

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._patience.alone_s))
            if self._alone():
                self._fail_waiting(SandboxError(self._nobody()))

    def _fail_waiting(self, error: SandboxError) -> None:
        while self._queue:
            self._fail(self._queue.pop(), error)
