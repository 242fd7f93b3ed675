"""The pool: programs in, results out; everything between is supervised.

    async with SandboxPool(PoolConfig()) as pool:
        result = await pool.run(ExecutionRequest(code="1 + 1"))

One event loop owns a pool. Every accepted call ends in exactly one result or one `SandboxError`;
a call whose cell dies is given to another, so a program may run twice, its result is told once.
"""

import asyncio
import contextlib
import logging
import os
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rstar_ray.errors import ConfigError, SandboxError
from rstar_ray.outcome import Outcome
from sandbox.cage import cpp_program, cut, flavors, wire
from sandbox.cage.scratch import clear_away
from sandbox.errors import SandboxClosed, SandboxFull, SandboxLate, SandboxLost
from sandbox.fair_queue import FairQueue
from sandbox.isolation import IsolationLevel, IsolationReport, cage_spec, program_path
from sandbox.outcomes import kept_bytes, read_result
from sandbox.processes import CellHandle, WarmServer
from sandbox.request import MAX_CODE_CHARS, ExecutionRequest, ExecutionResult
from sandbox.self_test import PROBES, read_probes

TICK_S = 0.25
SILENCE_S = 1.5  # a process that says nothing for so long, although asked, is wedged ...
STARVING_S = 15.0  # ... unless it is ready to run and merely gets no core
PING_AFTER_S = 0.5
START_S = 60.0  # for a warm server to import everything on a busy machine
CELL_START_S = 10.0
MAX_FAILURES = 3  # of one kind of server in a row, or of its cells
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How one pool runs. Raises ConfigError for what cannot work."""

    level: str = IsolationLevel.NAMESPACES  # required; what cannot reach it refuses to start ...
    allow_landlock: bool = False  # ... unless this accepts `landlock` where namespaces are refused
    slots: int = 0  # programs running at once; 0: one per core
    queue_size: int = 65_536  # calls waiting at most
    deadline_s: float = 600.0  # a call's default deadline, queue included
    attempts: int = 2  # cells that a call may lose before it fails
    spare_cells: int = 1  # idle cells per kind of server beyond one per slot
    calls_per_cell: int = 2_000  # then it is replaced
    cells_per_server: int = 1_000  # likewise
    flavors: tuple[str, ...] = flavors.FOR_PROGRAMS
    python: str = sys.executable

    def __post_init__(self) -> None:
        if self.level not in tuple(IsolationLevel):
            raise ConfigError("level", f"{self.level!r} is no isolation level", f"use one of {list(IsolationLevel)}")
        for name, low in (("slots", 0), ("queue_size", 1), ("attempts", 1), ("calls_per_cell", 1), ("spare_cells", 0)):
            if getattr(self, name) < low:
                raise ConfigError(name, f"{getattr(self, name)} is too small", f"use {low} or more")
        if flavors.LEAN not in self.flavors:
            raise ConfigError("flavors", f"{self.flavors} lacks {flavors.LEAN!r}", "add it: programs fall back on it")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """What a pool has done since it started."""

    level: str
    slots: int
    running: int
    waiting: int  # calls in the queue
    accepted: int
    refused: int  # for want of room
    finished: dict[str, int] = field(default_factory=dict[str, int])  # results by outcome
    failed: int  # calls that ended in a SandboxError
    retried: int  # programs given to a second cell
    cells_replaced: int  # by age or clean-up
    cells_lost: int  # died or wedged
    servers_lost: int
    waiting_s: float  # summed over calls: accepted to started
    running_s: float  # summed: started to finished
    timed_out_s: float  # the part of running_s that went to time-outs
    servers_memory_bytes: int  # peak resident, all warm servers


@dataclass(slots=True, eq=False)
class _Call:
    """One accepted call on its way."""

    request: ExecutionRequest
    caller: str
    flavor: str
    number: int
    answer: asyncio.Future[ExecutionResult]
    accepted_at: float
    started_at: float = 0.0
    attempts: int = 0
    cell: CellHandle | None = None


@dataclass(slots=True, eq=False)
class _Flavor:
    """One kind of warm server, its cells and the calls that want them."""

    name: str
    server: WarmServer | None = None
    retired: list[WarmServer] = field(default_factory=list[WarmServer])
    failures: int = 0  # of the server, in a row
    reason: str = ""  # of the last failure
    cell_failures: int = 0
    forked: int = 0  # cells of the present server
    cells: set[CellHandle] = field(default_factory=set[CellHandle])
    idle: list[CellHandle] = field(default_factory=list[CellHandle])
    queue: FairQueue[_Call] = field(default_factory=FairQueue[_Call])


class SandboxPool:
    """Runs programs in kernel cages on this machine, `slots` at a time."""

    def __init__(self, config: PoolConfig | None = None) -> None:
        self.config = config or PoolConfig()
        self._slots = self.config.slots or len(os.sched_getaffinity(0))
        self._flavors: dict[str, _Flavor] = {}
        self._report: IsolationReport | None = None
        self._level = IsolationLevel(self.config.level)
        self._folder = ""
        self._instead: dict[str, str] = {}  # flavors that cannot be had, and what serves for them
        self._clearing: set[asyncio.Future[None]] = set()  # folders of former cells on their way out
        self._free_numbers: list[int] = []
        self._next_number = 0
        self._next_call = 0
        self._running = 0
        self._waiting = 0
        self._open = False
        self._idle_event = asyncio.Event()
        self._changed = asyncio.Event()  # a server or cell became ready, or failed
        self._supervisor: asyncio.Task[None] | None = None
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
        """The isolation achieved; only after `start`."""
        if self._report is None:
            raise SandboxClosed("the pool has not started")
        return self._report

    async def start(self) -> IsolationReport:
        """Start servers and cells and test the cage; returns what was achieved.

        Raises SandboxError, with the reason and the mend, where the required level does not work.
        """
        self._folder = tempfile.mkdtemp(prefix="sandbox-")
        Path(self._folder).chmod(0o711)
        wanted = [self._level]
        if self._level is IsolationLevel.NAMESPACES and self.config.allow_landlock:
            wanted.append(IsolationLevel.LANDLOCK)
        declined: list[str] = []
        for level in wanted:
            try:
                self._report = await self._try_level(level, tuple(declined))
            except SandboxError as error:
                declined.append(f"{level}: {error}")
                await self._stop_everything()
                continue
            self._supervisor = asyncio.create_task(self._supervise(), name="sandbox supervisor")
            for name in self.config.flavors:
                self._flavor(name)
            return self._report
        self._remove_folder()
        raise SandboxError(f"the sandbox does not start: {'; '.join(declined)}. {_mend(wanted)}")

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more calls, wait up to `drain_s` for those accepted, end everything."""
        self._open = False
        if drain_s > 0 and (self._running or self._waiting):
            self._idle_event.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle_event.wait(), drain_s)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        await self._stop_everything()
        if self._clearing:
            await asyncio.wait(self._clearing)
        await asyncio.to_thread(self._remove_folder)

    def _remove_folder(self) -> None:
        if self._folder:
            for home in Path(self._folder).iterdir():
                clear_away(str(home))
            Path(self._folder).rmdir()
            self._folder = ""

    async def _stop_everything(self) -> None:
        self._open = False
        kinds, self._flavors = list(self._flavors.values()), {}
        for kind in kinds:
            for cell in list(kind.cells):
                call = cell.call
                cell.channel.kill()
                if call is not None:
                    self._fail(call, SandboxClosed("the pool closed before the program ended"))
            while kind.queue:
                self._fail(kind.queue.pop(), SandboxClosed("the pool closed before the program started"))
            for server in [kind.server, *kind.retired]:
                if server is not None:
                    server.kill()
        self._running = 0
        self._waiting = 0
        self._idle_event.set()

    # Calls

    async def run(
        self, request: ExecutionRequest, caller: str = "", *, deadline_s: float | None = None
    ) -> ExecutionResult:
        """Run one program; `caller` shares the pool fairly with others.

        `deadline_s` bounds the whole call, queue included (default: the pool's). Cancelling the
        call ends the program. Raises SandboxFull, SandboxLate, SandboxLost or SandboxClosed.
        """
        return await self.submit(request, caller, deadline_s=deadline_s)

    def submit(
        self, request: ExecutionRequest, caller: str = "", *, deadline_s: float | None = None
    ) -> asyncio.Future[ExecutionResult]:
        """As `run`, without a coroutine: returns a future that may be cancelled. Raises as `run`."""
        if not self._open:
            raise SandboxClosed("the pool is closed")
        if self._waiting >= self.config.queue_size:
            self._counts["refused"] += 1
            raise SandboxFull(f"{self._waiting} calls wait already; the queue holds no more")
        loop = asyncio.get_running_loop()
        invalid = self._refusal(request)
        if invalid:
            self._counts["accepted"] += 1
            self._finished[Outcome.INVALID] += 1
            refused: asyncio.Future[ExecutionResult] = loop.create_future()
            refused.set_result(
                ExecutionResult(outcome=Outcome.INVALID, reason=invalid, stderr=invalid, call_id=request.call_id)
            )
            return refused
        flavor = flavors.VERIFY if request.trusted else flavors.LEAN
        if request.language == "python" and not request.trusted:
            flavor = flavors.choose(request.code)
        kind = self._flavor(flavor)
        if kind.server is None and kind.failures >= MAX_FAILURES:
            raise SandboxError(f"no {kind.name} server: {kind.reason}")
        self._next_call += 1
        call = _Call(request, caller, flavor, self._next_call, loop.create_future(), time.monotonic())
        limit = self.config.deadline_s if deadline_s is None else deadline_s
        timer = loop.call_later(limit, self._fail, call, SandboxLate(f"no answer within {limit:g} s, queue included"))
        call.answer.add_done_callback(lambda _: self._settle(call, timer))
        self._counts["accepted"] += 1
        self._waiting += 1
        kind.queue.push(caller, call)
        self._dispatch()
        return call.answer

    def _refusal(self, request: ExecutionRequest) -> str:
        """Why a program cannot be run at all; empty where it can."""
        if len(request.code) > MAX_CODE_CHARS:
            return f"The source has {len(request.code)} characters; at most {MAX_CODE_CHARS} are run."
        if request.language == "cpp" and self._level is not IsolationLevel.NAMESPACES:
            return f"C++ needs processes, which level {self._level} cannot contain."
        if request.language == "cpp" and cpp_program.compiler() is None:
            return "g++ is not installed."
        return ""

    def _settle(self, call: _Call, timer: asyncio.TimerHandle) -> None:
        """Whatever ended the call, its program ends too."""
        timer.cancel()
        if call.cell is not None:
            call.cell.say(wire.CANCEL)  # its result finds nobody waiting
        elif call.started_at == 0.0:
            self._waiting -= 1
        self._note_idle()

    def _fail(self, call: _Call, error: SandboxError) -> None:
        if not call.answer.done():
            self._counts["failed"] += 1
            call.answer.set_exception(error)

    def _dispatch(self) -> None:
        while self._running < self._slots:
            ready = [kind for kind in self._flavors.values() if kind.idle and kind.queue]
            if not ready:
                return
            kind = min(ready, key=_oldest)
            call = kind.queue.pop()
            if not call.answer.done():
                self._give(kind, kind.idle.pop(), call)

    def _give(self, kind: _Flavor, cell: CellHandle, call: _Call) -> None:
        request, limits = call.request, call.request.limits
        source = request.code
        if request.language == "cpp":
            source = cpp_program.wrap(source, cpp_program.compiler() or "g++")
        code = source.encode("utf-8", "surrogatepass")
        stdin = request.stdin if isinstance(request.stdin, bytes) else request.stdin.encode("utf-8", "surrogatepass")
        out_head, out_tail = kept_bytes(limits.stdout_chars, cut.STDOUT_HEAD_SHARE)
        err_head, err_tail = kept_bytes(limits.stderr_chars, cut.STDERR_HEAD_SHARE)
        flags = wire.PROCESSES_ALLOWED if request.language == "cpp" else 0
        message = wire.Call(
            kind=wire.CALL,
            flags=flags,
            call_id=call.number,
            wall_s=limits.wall_s,
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_bytes + limits.interpreter_bytes,
            output_bytes=limits.output_bytes,
            seed=-1 if request.seed is None else request.seed,
            code_bytes=len(code),
            stdin_bytes=len(stdin),
            out_head=out_head,
            out_tail=out_tail,
            err_head=err_head,
            err_tail=err_tail,
        )
        if call.started_at == 0.0:
            self._waiting -= 1
            call.started_at = time.monotonic()
            self._seconds["waiting"] += call.started_at - call.accepted_at
        self._running += 1
        call.attempts += 1
        call.cell, cell.call = cell, call
        cell.calls += 1
        cell.last_heard = asyncio.get_running_loop().time()
        try:
            cell.send(message, code, stdin)
        except OSError:
            self._lose(kind, cell)

    # Cells

    def _on_cell_event(self, cell: CellHandle, event: int, payload: memoryview) -> None:
        kind = self._flavors.get(cell.flavor)
        if kind is None or cell not in kind.cells:
            return
        if event == wire.HELLO:
            kind.cell_failures = kind.failures = 0
            kind.idle.append(cell)
            self._changed.set()
            self._dispatch()
        elif event == wire.RESULT:
            self._take_result(kind, cell, payload)
        else:
            self._lose(kind, cell)

    def _take_result(self, kind: _Flavor, cell: CellHandle, payload: memoryview) -> None:
        call: _Call | None = cell.call
        try:
            seen = wire.unpack_result(payload)
            if call is None or seen.call_id != call.number:
                raise ValueError("an answer to no question")
            result = None if call.answer.done() else read_result(call.request, payload)
        except (struct.error, ValueError):
            self._lose(kind, cell)
            return
        cell.call = call.cell = None
        self._running -= 1
        spent = time.monotonic() - call.started_at
        self._seconds["running"] += spent
        if result is not None:
            self._finished[result.outcome] += 1
            if result.outcome is Outcome.TIMEOUT:
                self._seconds["timed_out"] += spent
            call.answer.set_result(result)
        if seen.flags & wire.RETIRE or cell.calls >= self.config.calls_per_cell:
            self._counts["cells_replaced"] += 1
            self._discard(kind, cell)
        else:
            kind.idle.append(cell)
        self._dispatch()
        self._note_idle()

    def _lose(self, kind: _Flavor, cell: CellHandle) -> None:
        """A cell died, wedged or lied: end it and give its call to another."""
        call: _Call | None = cell.call
        started = cell.ready
        self._discard(kind, cell)
        if not started:
            kind.cell_failures += 1
            kind.reason = cell.failure or "a cell did not start"
            self._changed.set()
            if self._open and kind.cell_failures >= MAX_FAILURES and kind.server is not None:
                kind.cell_failures = 0
                kind.server.kill()
                self._server_lost(kind, kind.reason)
        else:
            self._counts["cells_lost"] += 1
        if call is not None:
            cell.call = call.cell = None
            self._running -= 1
            if call.answer.done():
                pass
            elif call.attempts >= self.config.attempts:
                self._fail(call, SandboxLost(f"{call.attempts} cells were lost under this call"))
            else:
                self._counts["retried"] += 1
                kind.queue.push_front(call.caller, call)
        self._dispatch()
        self._note_idle()

    def _discard(self, kind: _Flavor, cell: CellHandle) -> None:
        cell.channel.kill()
        kind.cells.discard(cell)
        if cell in kind.idle:
            kind.idle.remove(cell)
        self._free_numbers.append(cell.number)
        if self._level is not IsolationLevel.NAMESPACES:
            clearing = asyncio.get_running_loop().run_in_executor(None, clear_away, self._home(cell.number))
            self._clearing.add(clearing)
            clearing.add_done_callback(self._clearing.discard)
        if self._open:
            self._fill(kind)

    def _home(self, number: int) -> str:
        return f"{self._folder}/{number}"

    def _new_home(self, number: int, level: IsolationLevel) -> str:
        home = Path(self._home(number))
        if level is not IsolationLevel.NAMESPACES:
            home.mkdir(mode=0o700, exist_ok=True)
            if os.geteuid() == 0 and level is IsolationLevel.LANDLOCK:
                owner = cage_spec(level).first_uid + number
                os.chown(home, owner, owner)
        return str(home)

    def _fill(self, kind: _Flavor) -> None:
        """Have as many cells as may run at once, and the spare ones."""
        server = kind.server
        if server is None or not server.ready or kind.cell_failures >= MAX_FAILURES:
            return
        if kind.forked >= self.config.cells_per_server:
            kind.retired.append(server)
            self._start_server(kind)
            return
        while len(kind.cells) < self._slots + self.config.spare_cells:
            number = self._free_numbers.pop(0) if len(self._free_numbers) > 64 else self._next_number
            if number == self._next_number:
                self._next_number += 1
            cell = CellHandle(number, kind.name, self._on_cell_event)
            kind.cells.add(cell)
            kind.forked += 1
            try:
                server.fork_cell(number, self._new_home(number, self._level), cell.channel)
            except OSError:
                self._discard_quietly(kind, cell)
                return

    def _discard_quietly(self, kind: _Flavor, cell: CellHandle) -> None:
        cell.channel.kill()
        kind.cells.discard(cell)

    # Servers

    def _flavor(self, name: str) -> _Flavor:
        if name not in self.config.flavors and name != flavors.VERIFY:
            name = flavors.LEAN
        name = self._instead.get(name, name)
        kind = self._flavors.get(name)
        if kind is None:
            kind = self._flavors[name] = _Flavor(name)
            self._start_server(kind)
        return kind

    def _start_server(self, kind: _Flavor) -> None:
        kind.forked = 0

        def on_ready() -> None:
            if self._flavors.get(kind.name) is kind and kind.server is server:
                for old in kind.retired:
                    old.kill()
                kind.retired.clear()
                self._fill(kind)

        def on_end(reason: str) -> None:
            if self._flavors.get(kind.name) is kind and kind.server is server:
                self._server_lost(kind, reason)

        server = WarmServer(kind.name, self.config.python, program_path(), cage_spec(self._level), on_ready, on_end)
        kind.server = server

    def _server_lost(self, kind: _Flavor, reason: str) -> None:
        self._counts["servers_lost"] += 1
        kind.server = None
        kind.reason = reason
        kind.failures += 1
        self._changed.set()
        if kind.failures < MAX_FAILURES:
            self._start_server(kind)
        elif kind.name in (flavors.LEAN, flavors.VERIFY):
            while kind.queue:
                self._fail(kind.queue.pop(), SandboxError(f"no {kind.name} server: {reason}"))
        else:
            # A library is missing, say: the lean server runs what it can and shows the rest's ImportError.
            _log.warning("no %s server (%s); its programs go to the lean one", kind.name, reason)
            self._instead[kind.name] = flavors.LEAN
            lean = self._flavor(flavors.LEAN)
            while kind.queue:
                call = kind.queue.pop()
                lean.queue.push(call.caller, call)
            self._dispatch()

    async def _try_level(self, level: IsolationLevel, declined: tuple[str, ...]) -> IsolationReport:
        """Bring up the lean server at `level` and attack it. Raises SandboxError with the reason."""
        self._level = level
        kind = self._flavor(flavors.LEAN)
        end = time.monotonic() + START_S
        while not kind.idle:
            if kind.failures or kind.cell_failures or time.monotonic() > end:
                raise SandboxError(kind.reason or f"no cell within {START_S:g} s")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.5)
        self._open = True
        facts = kind.idle[0].facts
        if level is IsolationLevel.PROCESS:
            return IsolationReport(level=level, facts=facts, declined=declined)
        result = await self.run(ExecutionRequest(code=PROBES), "self-test", deadline_s=30.0)
        contained, escaped = read_probes(result)
        if escaped:
            raise SandboxError(f"the self-test got through with {', '.join(escaped)}")
        return IsolationReport(level=level, facts=facts, contained=contained, declined=declined)

    # Supervision

    async def _supervise(self) -> None:
        """Find what is dead or wedged within 2 s; silent only counts while we ourselves were awake."""
        loop = asyncio.get_running_loop()
        last_tick = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            late = now - last_tick > 4 * TICK_S
            last_tick = now
            for kind in list(self._flavors.values()):
                for cell in list(kind.cells):
                    self._check_cell(kind, cell, now, late)
                self._check_server(kind, now, late)
                if self._open:
                    self._fill(kind)

    def _check_cell(self, kind: _Flavor, cell: CellHandle, now: float, late: bool) -> None:
        silent_s = now - cell.last_heard
        if late:
            cell.last_heard = max(cell.last_heard, now - PING_AFTER_S)
        elif not cell.ready:
            if silent_s > CELL_START_S:
                self._lose(kind, cell)
        elif silent_s > SILENCE_S and (cell.call is not None or cell.pinged):
            if silent_s > STARVING_S or not cell.channel.wants_to_run():
                self._lose(kind, cell)
        elif silent_s > PING_AFTER_S and cell.call is None and not cell.pinged:
            cell.pinged = True
            cell.last_heard = now
            cell.say(wire.PING)

    def _check_server(self, kind: _Flavor, now: float, late: bool) -> None:
        server = kind.server
        if server is None:
            return
        silent_s = now - server.last_heard
        if late:
            server.last_heard = max(server.last_heard, now - PING_AFTER_S)
        elif silent_s > (START_S if not server.ready else SILENCE_S) and (server.pinged or not server.ready):
            if silent_s > max(STARVING_S, START_S * (not server.ready)) or not server.channel.wants_to_run():
                server.kill()
                self._server_lost(kind, "it stopped answering")
        elif server.ready and silent_s > PING_AFTER_S and not server.pinged:
            server.last_heard = now
            server.ping()

    # Facts

    def _note_idle(self) -> None:
        if not self._running and not self._waiting:
            self._idle_event.set()

    def stats(self) -> PoolStats:
        """Counts and sums since the start."""
        servers = [kind.server for kind in self._flavors.values() if kind.server is not None]
        return PoolStats(
            level=str(self._level),
            slots=self._slots,
            running=self._running,
            waiting=self._waiting,
            accepted=self._counts["accepted"],
            refused=self._counts["refused"],
            finished=dict(self._finished),
            failed=self._counts["failed"],
            retried=self._counts["retried"],
            cells_replaced=self._counts["cells_replaced"],
            cells_lost=self._counts["cells_lost"],
            servers_lost=self._counts["servers_lost"],
            waiting_s=self._seconds["waiting"],
            running_s=self._seconds["running"],
            timed_out_s=self._seconds["timed_out"],
            servers_memory_bytes=sum(server.memory_bytes for server in servers),
        )


def _oldest(kind: _Flavor) -> int:
    return kind.queue.first().number


def _mend(wanted: list[IsolationLevel]) -> str:
    if wanted[-1] is IsolationLevel.NAMESPACES:
        return (
            "Allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; "
            "in a container: a seccomp profile that permits unshare), or accept landlock (--sandbox.level landlock; in "
            "`python -m sandbox`, --allow-landlock)."
        )
    return "Use Linux 5.15 or newer with Landlock and seccomp, and an interpreter that other users may read."
