"""Warm servers and their cells: as many as are wanted, replaced when they age, die or fall silent."""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from rstar_ray.errors import SandboxError
from sandbox import supervision
from sandbox.cage import flavors, wire
from sandbox.call import Call
from sandbox.errors import InterpreterFailed, SandboxSlow
from sandbox.fair_queue import FairQueue
from sandbox.homes import Homes
from sandbox.isolation import MAX_THREADS, IsolationLevel, cage_spec, program_path
from sandbox.pool_config import PoolConfig
from sandbox.processes import CellHandle, WarmServer
from sandbox.supervision import Verdict

MAX_FAILURES = 3  # of one kind of server in a row, or of its cells
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Crew:
    """One kind of warm server, its cells and the calls that want them."""

    name: str
    server: WarmServer | None = None
    retired: list[WarmServer] = field(default_factory=list[WarmServer])
    failures: int = 0  # of the server, in a row
    reason: str = ""  # of the last failure
    interpreter_fails: bool = False
    cell_failures: int = 0
    forked: int = 0  # cells of the present server
    cells: set[CellHandle] = field(default_factory=set[CellHandle])
    idle: list[CellHandle] = field(default_factory=list[CellHandle])
    queue: FairQueue[Call] = field(default_factory=FairQueue[Call])

    @property
    def given_up(self) -> bool:
        return self.server is None and self.failures >= MAX_FAILURES


class Dispatch(Protocol):
    """What the crews tell whoever gives them work."""

    def cells_are_idle(self) -> None: ...

    def program_ended(self, crew: Crew, cell: CellHandle, payload: memoryview) -> None: ...

    def call_lost_its_cell(self, crew: Crew, call: Call) -> None: ...

    def no_server(self, crew: Crew) -> None: ...


class Crews:
    """Every crew of one pool at one level."""

    def __init__(self, config: PoolConfig, slots: int, level: IsolationLevel, homes: Homes) -> None:
        self.level = level
        self.counts: Counter[str] = Counter()
        self.changed = asyncio.Event()  # a server or a cell became ready, or failed
        self._config = config
        self._wanted = slots + config.spare_cells
        self._homes = homes
        self._crews: dict[str, Crew] = {}
        self._instead: dict[str, str] = {}  # flavors that cannot be had, and what serves for them
        self._dispatch: Dispatch | None = None
        self._open = True
        # Threads are counted by uid; where that is the whole account's, only looking bounds them.
        self._shares_uid = level is IsolationLevel.LANDLOCK and os.geteuid() != 0

    def report_to(self, dispatch: Dispatch) -> None:
        """Tell `dispatch` from now on."""
        self._dispatch = dispatch

    def __getitem__(self, flavor: str) -> Crew:
        """The crew of a flavor, started when first asked for."""
        if flavor not in self._config.flavors and flavor != flavors.VERIFY:
            flavor = flavors.LEAN
        flavor = self._instead.get(flavor, flavor)
        crew = self._crews.get(flavor)
        if crew is None:
            crew = self._crews[flavor] = Crew(flavor)
            self._start_server(crew)
        return crew

    def everyone(self) -> list[Crew]:
        """All crews that were started."""
        return list(self._crews.values())

    async def first_cell(self) -> CellHandle:
        """A cell of the lean server, once one is ready.

        Raises SandboxError; of its kinds SandboxSlow for want of time, and InterpreterFailed.
        """
        lean = self[flavors.LEAN]
        end = time.monotonic() + supervision.START_S
        while not lean.idle:
            if lean.interpreter_fails:
                raise InterpreterFailed(lean.reason)
            if lean.failures or lean.cell_failures:
                raise SandboxError(lean.reason)
            if time.monotonic() > end:
                raise SandboxSlow(f"no cell within {supervision.START_S:g} s")
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.5)
        return lean.idle[0]

    def close(self) -> list[Crew]:
        """End every process; returns the crews, whose calls find no answer any more."""
        self._open = False
        crews, self._crews = self.everyone(), {}
        for crew in crews:
            for cell in crew.cells:
                cell.channel.kill()
            for server in [crew.server, *crew.retired]:
                if server is not None:
                    server.kill()
        return crews

    # Cells

    def _on_cell_event(self, cell: CellHandle, event: int, payload: memoryview) -> None:
        crew = self._crews.get(cell.flavor)
        if crew is None or cell not in crew.cells:
            return
        if event == wire.HELLO:
            crew.cell_failures = crew.failures = 0
            self.rest(crew, cell)
            self.changed.set()
        elif event == wire.RESULT and self._dispatch is not None:
            self._dispatch.program_ended(crew, cell, payload)
        else:
            self.lose(crew, cell, "it ended")

    def rest(self, crew: Crew, cell: CellHandle) -> None:
        """The cell has nothing to do."""
        crew.idle.append(cell)
        self._tell_idle()

    def replace(self, crew: Crew, cell: CellHandle) -> None:
        """The cell has done its share."""
        self.counts["cells_replaced"] += 1
        self._discard(crew, cell)
        self._fill(crew)
        self._tell_idle()

    def lose(self, crew: Crew, cell: CellHandle, reason: str) -> None:
        """A cell died, wedged or lied: end it, and say whose call it had."""
        call, started = cell.call, cell.ready
        self._discard(crew, cell)
        if started:
            self.counts["cells_lost"] += 1
            _log.debug("a cell of the %s server is lost, %s", crew.name, reason)
        else:
            self._cell_did_not_start(crew, cell.failure or f"a cell did not start: {reason}")
        self._fill(crew)
        if call is not None and self._dispatch is not None:
            cell.call = call.cell = None
            self._dispatch.call_lost_its_cell(crew, call)
        self._tell_idle()

    def _cell_did_not_start(self, crew: Crew, reason: str) -> None:
        crew.cell_failures += 1
        crew.reason = reason
        self.changed.set()
        if self._open and crew.cell_failures >= MAX_FAILURES and crew.server is not None:
            crew.cell_failures = 0
            crew.server.kill()
            self._server_lost(crew, reason)

    def _discard(self, crew: Crew, cell: CellHandle) -> None:
        cell.channel.kill()
        crew.cells.discard(cell)
        if cell in crew.idle:
            crew.idle.remove(cell)
        self._homes.give_back(cell.number, self.level)

    def _tell_idle(self) -> None:
        if self._dispatch is not None:
            self._dispatch.cells_are_idle()

    def _fill(self, crew: Crew) -> None:
        """Have as many cells as may run at once, and the spare ones."""
        server = crew.server
        if not self._open or server is None or not server.ready or crew.cell_failures >= MAX_FAILURES:
            return
        if crew.forked >= self._config.cells_per_server:
            crew.retired.append(server)
            self._start_server(crew)
            return
        while len(crew.cells) < self._wanted:
            try:
                number, home, group = self._homes.take(self.level)
                cell = CellHandle(number, crew.name, self._on_cell_event)
            except OSError as error:  # a shortage of ours, of descriptors, say; the supervisor comes again
                crew.reason = f"no room for a cell: {error}"
                return
            crew.cells.add(cell)
            crew.forked += 1
            try:
                server.fork_cell(number, home, group, cell.channel)
            except OSError:
                self._discard(crew, cell)
                return

    # Servers

    def _start_server(self, crew: Crew) -> None:
        crew.forked = 0

        def on_ready() -> None:
            if self._crews.get(crew.name) is crew and crew.server is server:
                for old in crew.retired:
                    old.kill()
                crew.retired.clear()
                self._fill(crew)

        def on_end(reason: str) -> None:
            if self._crews.get(crew.name) is crew and crew.server is server:
                self._server_lost(crew, reason)

        try:
            server = WarmServer(crew.name, self._config.python, program_path(), cage_spec(self.level), on_ready, on_end)
        except OSError as error:  # the supervisor comes again
            crew.server, crew.interpreter_fails = None, error.filename is not None  # else a shortage of ours
            problem = f"{self._config.python}: {error.strerror}" if crew.interpreter_fails else f"no room: {error}"
            crew.reason = f"a server cannot be started ({problem})"
            return
        crew.server, crew.interpreter_fails = server, False

    def _server_lost(self, crew: Crew, reason: str) -> None:
        self.counts["servers_lost"] += 1
        _log.warning("the %s server is lost: %s", crew.name, reason)
        crew.server = None
        crew.reason = reason
        crew.failures += 1
        self.changed.set()
        if not crew.given_up:
            self._start_server(crew)
        elif crew.name in (flavors.LEAN, flavors.VERIFY):
            if self._dispatch is not None:
                self._dispatch.no_server(crew)
        else:
            self._lean_instead(crew)

    def _lean_instead(self, crew: Crew) -> None:
        """A library is missing, say: the lean server runs what it can and shows the rest's ImportError."""
        _log.warning("no %s server (%s); its programs go to the lean one", crew.name, crew.reason)
        self._instead[crew.name] = flavors.LEAN
        lean = self[flavors.LEAN]
        while crew.queue:
            call = crew.queue.pop()
            lean.queue.push(call.caller, call)
        self._tell_idle()

    def try_again(self, crew: Crew) -> None:
        """One more server where none came up, for a call that wants it: what killed the others may have passed."""
        crew.failures = MAX_FAILURES - 1
        self._start_server(crew)

    # Supervision

    async def supervise(self) -> None:
        """Find what is dead or wedged within 2 s; silence only counts while we ourselves were awake."""
        loop = asyncio.get_running_loop()
        last_tick = loop.time()
        while True:
            await asyncio.sleep(supervision.TICK_S)
            now = loop.time()
            if supervision.overslept(now - last_tick):
                self._hear_everybody(now)
            last_tick = now
            try:
                self._check_everybody(now)
            except Exception:  # nobody awaits this task: without it what dies would stay dead, and nobody be told
                _log.exception("the supervisor has met a fault of ours and goes on")

    def _check_everybody(self, now: float) -> None:
        for crew in self.everyone():
            for cell in list(crew.cells):
                self._check_cell(crew, cell, now)
            self._check_server(crew, now)
            self._fill(crew)

    def _hear_everybody(self, now: float) -> None:
        for crew in self.everyone():
            for each in [*crew.cells, *([crew.server] if crew.server is not None else [])]:
                each.last_heard = max(each.last_heard, now - supervision.PING_AFTER_S)
                each.channel.trust()

    def _check_cell(self, crew: Crew, cell: CellHandle, now: float) -> None:
        if self._shares_uid and cell.call is not None and cell.channel.num_threads_below() > MAX_THREADS:
            cell.say(wire.CROWDED)
        silent_s = now - cell.last_heard
        verdict = supervision.on_cell(silent_s, ready=cell.ready, busy=cell.call is not None, pinged=cell.pinged)
        if verdict is Verdict.PING:
            cell.last_heard = now
            cell.ping()
        elif verdict is Verdict.SUSPECT:
            cell.channel.suspect()
        elif supervision.is_lost(verdict, cell.channel):
            self.lose(crew, cell, f"it said nothing for {silent_s:.1f} s")

    def _check_server(self, crew: Crew, now: float) -> None:
        server = crew.server
        if server is None:
            if not crew.given_up:
                self._start_server(crew)
            return
        verdict = supervision.on_server(now - server.last_heard, ready=server.ready, pinged=server.pinged)
        if verdict is Verdict.PING:
            server.last_heard = now
            server.ping()
        elif verdict is Verdict.SUSPECT:
            server.channel.suspect()
        elif supervision.is_lost(verdict, server.channel):
            server.kill()
            self._server_lost(crew, f"it said nothing for {now - server.last_heard:.1f} s")
