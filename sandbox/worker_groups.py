"""Keeps the wanted number of warm servers and workers; replaces them when they age, die or stop answering."""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from rstar_ray.config import SandboxConfig
from rstar_ray.errors import InterpreterFailed, SandboxError, SandboxSlow
from sandbox import supervision
from sandbox.call import Call, FairQueue
from sandbox.isolation import MAX_THREADS, IsolationLevel, jail_spec, program_path
from sandbox.jail import preload, wire
from sandbox.processes import ForkServer, WorkerHandle
from sandbox.supervision import ProcessHealth
from sandbox.workspaces import Workspaces

MAX_FAILURES = 3  # in a row, of one kind of server or of its workers
RETRY_S = 60.0  # after which another server is tried, if the calls of its kind can be served without it
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """One kind of warm server, its workers, and the calls that wait for them."""

    name: str
    server: ForkServer | None = None
    retired: list[ForkServer] = field(default_factory=list[ForkServer])
    failures: int = 0  # of the server, in a row
    retry_at_s: float = 0.0  # on the monotonic clock
    reason: str = ""  # of the last failure
    interpreter_fails: bool = False
    worker_failures: int = 0
    forked: int = 0  # workers forked by the current server
    workers: set[WorkerHandle] = field(default_factory=set[WorkerHandle])
    idle: list[WorkerHandle] = field(default_factory=list[WorkerHandle])
    queue: FairQueue[Call] = field(default_factory=FairQueue[Call])

    @property
    def given_up(self) -> bool:
        return self.server is None and self.failures >= MAX_FAILURES

    @property
    def is_stranded(self) -> bool:
        """Whether calls would wait in vain: no worker is left, and servers failed too often."""
        return not self.workers and self.failures >= MAX_FAILURES

    @property
    def has_substitute(self) -> bool:
        """Whether the lean server can run its programs; those that miss a library get an ImportError."""
        return self.name not in (preload.LEAN, preload.VERIFY)


class Dispatch(Protocol):
    """The pool's interface for its worker groups."""

    def workers_are_idle(self) -> None: ...

    def program_ended(self, group: WorkerGroup, worker: WorkerHandle, payload: memoryview) -> None: ...

    def call_lost_its_worker(self, group: WorkerGroup, call: Call) -> None: ...

    def no_server(self, group: WorkerGroup) -> None: ...


class WorkerGroups:
    """Every group of one pool at one level."""

    def __init__(
        self,
        pool: Dispatch,
        config: SandboxConfig,
        slots: int,
        level: IsolationLevel,
        workspaces: Workspaces,
        python: str,
    ) -> None:
        self.level = level
        self.counts: Counter[str] = Counter()
        self.changed = asyncio.Event()  # a server or a worker became ready, or failed
        self._pool = pool
        self._config = config
        self._python = python  # the interpreter of the programs
        self._wanted = slots + config.spare_workers
        self._workspaces = workspaces
        self._spec = jail_spec(level, workspaces.first_uid)
        self._groups: dict[str, WorkerGroup] = {}
        self._open = True
        # The kernel counts threads by uid; if programs share the account's uid, they are bounded only by supervision.
        self._shares_uid = level is IsolationLevel.LANDLOCK and os.geteuid() != 0

    def __getitem__(self, preload_set: str) -> WorkerGroup:
        """The group of a preload set; started at the first request."""
        if preload_set not in self._config.warm and preload_set != preload.VERIFY:
            preload_set = preload.LEAN
        group = self._groups.get(preload_set)
        if group is None:
            group = self._groups[preload_set] = WorkerGroup(preload_set)
            self._start_server(group)
        return group

    def for_call(self, preload_set: str) -> WorkerGroup:
        """The group for a new call: the lean one instead of one that cannot serve.

        Starts a server that was given up: its failures may have had a cause that is gone.
        """
        group = self[preload_set]
        needed = group.is_stranded and not group.has_substitute
        if group.given_up and (needed or time.monotonic() >= group.retry_at_s):
            self._start_server(group)
        return self.for_call(preload.LEAN) if group.is_stranded and group.has_substitute else group

    def everyone(self) -> list[WorkerGroup]:
        """All groups that were started."""
        return list(self._groups.values())

    async def first_worker(self) -> WorkerHandle:
        """Wait for a ready worker of the lean server.

        Raises SandboxError; SandboxSlow if the time was too short, InterpreterFailed if the interpreter does not start.
        """
        lean = self[preload.LEAN]
        end = time.monotonic() + supervision.START_S
        while not lean.idle:
            if lean.interpreter_fails:
                raise InterpreterFailed(lean.reason)
            if lean.failures or lean.worker_failures:
                raise SandboxError(lean.reason)
            if time.monotonic() > end:
                raise SandboxSlow(f"no worker within {supervision.START_S:g} s")
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.5)
        return lean.idle[0]

    def close(self) -> list[WorkerGroup]:
        """End every process; returns the groups, whose calls remain unanswered."""
        self._open = False
        groups, self._groups = self.everyone(), {}
        for group in groups:
            for worker in group.workers:
                worker.channel.kill()
            for server in [group.server, *group.retired]:
                if server is not None:
                    server.kill()
        return groups

    # Workers

    def _on_worker_event(self, worker: WorkerHandle, event: int, payload: memoryview) -> None:
        group = self._groups.get(worker.preload_set)
        if group is None or worker not in group.workers:
            return
        if event == wire.HELLO:
            group.worker_failures = group.failures = 0
            self.rest(group, worker)
            self.changed.set()
        elif event == wire.RESULT:
            self._pool.program_ended(group, worker, payload)
        else:
            self.lose(group, worker, "it ended")

    def rest(self, group: WorkerGroup, worker: WorkerHandle) -> None:
        """Mark a worker as idle."""
        group.idle.append(worker)
        self._pool.workers_are_idle()

    def replace(self, group: WorkerGroup, worker: WorkerHandle) -> None:
        """Replace a worker that has reached its number of calls, or must retire."""
        self.counts["workers_replaced"] += 1
        self._discard(group, worker)
        self._fill(group)
        self._pool.workers_are_idle()

    def lose(self, group: WorkerGroup, worker: WorkerHandle, reason: str) -> None:
        """End a worker that died, is stuck or sent an invalid answer; its call is reported to the pool."""
        call, started = worker.call, worker.ready
        self._discard(group, worker)
        if started:
            self.counts["workers_lost"] += 1
            _log.debug("a worker of the %s server is lost, %s", group.name, reason)
        else:
            self._worker_did_not_start(group, worker.failure or f"a worker did not start: {reason}")
        self._fill(group)
        if call is not None:
            worker.call = call.worker = None
            self._pool.call_lost_its_worker(group, call)
        self._pool.workers_are_idle()

    def _worker_did_not_start(self, group: WorkerGroup, reason: str) -> None:
        if group.server is None or not group.server.ready:
            return  # the worker was to be forked by an earlier server, which is lost
        group.worker_failures += 1
        group.reason = reason
        self.changed.set()
        if self._open and group.worker_failures >= MAX_FAILURES:
            group.worker_failures = 0
            group.server.kill()
            self._server_lost(group, reason)

    def _discard(self, group: WorkerGroup, worker: WorkerHandle) -> None:
        worker.channel.kill()
        group.workers.discard(worker)
        if worker in group.idle:
            group.idle.remove(worker)
        self._workspaces.give_back(worker.number, self.level)

    def _fill(self, group: WorkerGroup) -> None:
        """Start workers up to the number that may run at once, and the spare ones."""
        if not self._open:
            return
        if group.is_stranded and group.queue:
            self._relieve(group)
        server = group.server
        if server is None or not server.ready:
            return
        if group.forked >= self._config.workers_per_server:
            group.retired.append(server)
            self._start_server(group)
            return
        while len(group.workers) < self._wanted:
            number = None
            try:
                number, home, cgroup = self._workspaces.take(self.level)
                worker = WorkerHandle(number, group.name, self._on_worker_event)
            except OSError as error:  # we lack a resource, such as descriptors; the supervisor tries again
                if number is not None:
                    self._workspaces.give_back(number, self.level)
                group.reason = f"no room for a worker: {error}"
                return
            group.workers.add(worker)
            group.forked += 1
            try:
                server.fork_worker(number, home, cgroup, worker.channel)
            except OSError:
                self._discard(group, worker)
                return

    # Servers

    def _start_server(self, group: WorkerGroup) -> None:
        group.forked = 0

        def on_ready() -> None:
            if self._groups.get(group.name) is group and group.server is server:
                for old in group.retired:
                    old.kill()
                group.retired.clear()
                if len(group.workers) >= self._wanted:  # otherwise its first worker shows that it can serve
                    group.failures = 0
                self._fill(group)

        def on_end(reason: str) -> None:
            if self._groups.get(group.name) is group and group.server is server:
                self._server_lost(group, reason)

        try:
            server = ForkServer(group.name, self._python, program_path(), self._spec, on_ready, on_end)
        except OSError as error:  # the supervisor tries again
            group.server, group.interpreter_fails = None, error.filename is not None  # otherwise we lack a resource
            problem = f"{self._python}: {error.strerror}" if group.interpreter_fails else f"no room: {error}"
            group.reason = f"a server cannot be started ({problem})"
            return
        group.server, group.interpreter_fails = server, False

    def _server_lost(self, group: WorkerGroup, reason: str) -> None:
        self.counts["servers_lost"] += 1
        _log.warning("the %s server is lost: %s", group.name, reason)
        group.server = None
        group.reason = reason
        group.failures += 1
        self.changed.set()
        if not group.given_up:
            self._start_server(group)
            return
        _log.warning("no %s server after %d losses in a row", group.name, group.failures)
        group.retry_at_s = time.monotonic() + RETRY_S
        if group.is_stranded:
            self._relieve(group)

    def _relieve(self, group: WorkerGroup) -> None:
        """Move the calls of a stranded group to the lean one, or fail them if there is no substitute."""
        if group.has_substitute:
            lean = self.for_call(preload.LEAN)
            while group.queue:
                call = group.queue.pop()
                lean.queue.push(call.caller, call)
            self._pool.workers_are_idle()
        elif group.server is None:
            self._pool.no_server(group)

    # Supervision

    async def supervise(self) -> None:
        """Find dead or stuck processes within 2 s; silence counts only while this process was running."""
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
            except Exception:  # this task is not awaited; if it ended, dead processes would not be replaced
                _log.exception("unexpected error in the supervisor, which continues")

    def _check_everybody(self, now: float) -> None:
        for group in self.everyone():
            for worker in list(group.workers):
                self._check_worker(group, worker, now)
            self._check_server(group, now)
            self._fill(group)

    def _hear_everybody(self, now: float) -> None:
        for group in self.everyone():
            for each in [*group.workers, *([group.server] if group.server is not None else [])]:
                each.last_heard = max(each.last_heard, now - supervision.PING_AFTER_S)
                each.channel.trust()

    def _check_worker(self, group: WorkerGroup, worker: WorkerHandle, now: float) -> None:
        if self._shares_uid and worker.call is not None and worker.channel.num_threads_below() > MAX_THREADS:
            worker.say(wire.CROWDED)
        silent_s = now - worker.last_heard
        verdict = supervision.on_worker(
            silent_s, ready=worker.ready, busy=worker.call is not None, pinged=worker.pinged
        )
        if verdict is ProcessHealth.PING:
            worker.last_heard = now
            worker.ping()
        elif verdict is ProcessHealth.SUSPECT:
            worker.channel.suspect()
        elif supervision.is_lost(verdict, worker.channel):
            self.lose(group, worker, f"no answer for {silent_s:.1f} s")

    def _check_server(self, group: WorkerGroup, now: float) -> None:
        server = group.server
        if server is None:
            if not group.given_up:
                self._start_server(group)
            return
        verdict = supervision.on_server(now - server.last_heard, ready=server.ready, pinged=server.pinged)
        if verdict is ProcessHealth.PING:
            server.last_heard = now
            server.ping()
        elif verdict is ProcessHealth.SUSPECT:
            server.channel.suspect()
        elif supervision.is_lost(verdict, server.channel):
            server.kill()
            self._server_lost(group, f"no answer for {now - server.last_heard:.1f} s")
