"""The workers of a front: who has joined, who serves, and who is missing and why."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from sandbox.errors import SandboxFull
from sandbox.http.link import Inbox, Link, LinkTrouble, Silent, WorkerStatus
from sandbox.isolation import IsolationLevel

_log = logging.getLogger(__name__)

MAX_WORKERS = 256
MOST_OF_ONE = 512  # calls at one worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a front waits for what; nobody has had a reason to set these."""

    probe_s: float = 1.0  # between two probes of a worker
    probe_timeout_s: float = 5.0
    silent_s: float = 30.0  # without a word for so long a worker is missing
    longest_pause_s: float = 60.0  # before one that misbehaved again and again is looked at once more
    attempts: int = 3  # workers that a call may lose before it fails
    retry_s: float = 0.05  # before a broken connection is tried again; doubles
    reconnections: int = 6
    grace_s: float = 30.0  # for an answer, beside the time of its program and of one before it
    busy_s: float = 0.5  # a worker that has no room gets nothing for so long
    alone_s: float = 60.0  # without any worker for so long, calls fail


class State(StrEnum):
    """Of a worker, as the front sees it."""

    JOINING = "joining"  # it has not answered a probe yet
    SERVING = "serving"
    MISSING = "missing"
    LEAVING = "leaving"  # it finishes what it has


@dataclass(slots=True, eq=False)
class Worker:
    """One worker and what it has of ours."""

    address: str
    token: str
    link: Link
    heard_at: float
    state: State = State.JOINING
    why: str = ""  # it is missing
    slots: int = 0  # programs at once
    faults: int = 0  # since its last answer to a call
    left_alone_until: float = 0.0  # where it is missing
    busy_until: float = 0.0
    answered: int = 0  # calls
    calls: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    probing: asyncio.Task[None] | None = None

    @property
    def room(self) -> int:
        """How many more calls it is given: one for each core, and one that waits behind it."""
        return min(2 * self.slots, MOST_OF_ONE) - len(self.calls)


class Roster:
    """Workers join, are probed, are set aside and welcomed back, and leave; `changed` is called when one can serve."""

    def __init__(self, levels: Collection[IsolationLevel], patience: Patience, changed: Callable[[], None]) -> None:
        self._levels = levels
        self._patience = patience
        self._changed = changed
        self._workers: dict[str, Worker] = {}
        self._inbox = Inbox()
        self._ending: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    async def close(self) -> None:
        """Forget everybody."""
        for worker in list(self):
            self._forget(worker)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def serving(self) -> Collection[Worker]:
        """Those that may be given calls."""
        return [worker for worker in self if worker.state is State.SERVING]

    def missing(self) -> str:
        """Those that should be here and are not, with the reason; empty where none is missing."""
        gone = [f"{worker.address} ({worker.why})" for worker in self if worker.state is State.MISSING]
        return ", ".join(gone[:10]) + (f" and {len(gone) - 10} more" if len(gone) > 10 else "")

    def join(self, address: str, token: str) -> None:
        """Take in a worker, which may have been here before. Raises SandboxFull where there are too many."""
        known = self._workers.get(address)
        if known is not None and known.token == token:
            if known.state is State.LEAVING:
                known.state = State.JOINING
            return
        if known is not None:
            self.set_aside(known, "it has joined again with another token")
            self._forget(known)
        if len(self._workers) >= MAX_WORKERS:
            raise SandboxFull(f"{MAX_WORKERS} workers have joined; a front holds no more")
        link = Link(address, token, self._inbox)
        worker = self._workers[address] = Worker(address, token, link, heard_at=time.monotonic())
        worker.probing = asyncio.create_task(self._probe(worker), name=f"probes of {address}")

    def leave(self, address: str) -> int:
        """Give a worker no more calls; returns how many it still has. One that has none is forgotten."""
        worker = self._workers.get(address)
        if worker is None:
            return 0
        worker.state = State.LEAVING
        self.call_ended(worker)
        return len(worker.calls)

    def call_ended(self, worker: Worker) -> None:
        """A worker has one call less: one that leaves may be through."""
        if not worker.calls and worker.state is State.LEAVING:
            _log.info("worker %s has left", worker.address)
            self._forget(worker)

    def set_aside(self, worker: Worker, why: str) -> None:
        """A worker is missing: what it has is given to others, and it is looked at again later."""
        if worker.state is State.MISSING:
            worker.why = why
            return
        leaves = worker.state is State.LEAVING
        worker.state, worker.why, worker.faults = State.MISSING, why, worker.faults + 1
        pause_s = min(self._patience.probe_s * 2 ** min(worker.faults, 16), self._patience.longest_pause_s)
        worker.left_alone_until = time.monotonic() + pause_s  # longer, the oftener
        _log.warning("worker %s is missing: %s", worker.address, why)
        for task in worker.calls:
            if task is not asyncio.current_task():
                task.cancel()
        if leaves:
            self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        if self._workers.get(worker.address) is worker:
            del self._workers[worker.address]
        worker.state = State.MISSING
        if worker.probing is not None:
            worker.probing.cancel()  # even where it asks for this: it ends at its next wait
        for task in worker.calls:
            if task is not asyncio.current_task():
                task.cancel()
        ending = asyncio.create_task(self._end(worker))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end(self, worker: Worker) -> None:
        others = [task for task in (worker.probing, *worker.calls) if task is not None]
        await asyncio.gather(*others, return_exceptions=True)
        await worker.link.close()

    async def _probe(self, worker: Worker) -> None:
        """Ask a worker how it is, again and again."""
        while self._workers.get(worker.address) is worker:
            try:
                status = await worker.link.status(self._patience.probe_timeout_s)
            except Silent as silent:
                if time.monotonic() - worker.heard_at > self._patience.silent_s:
                    self.set_aside(worker, str(silent))
            except LinkTrouble as trouble:
                self.set_aside(worker, str(trouble))
            else:
                self._welcome(worker, status)
            await asyncio.sleep(self._patience.probe_s)
            while (pause_s := worker.left_alone_until - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)

    def _welcome(self, worker: Worker, status: WorkerStatus) -> None:
        worker.heard_at = time.monotonic()
        if status.level not in self._levels:
            self.set_aside(worker, f"it runs programs at level {status.level}, which this front does not accept")
            return
        worker.slots = min(status.slots, MOST_OF_ONE)
        if worker.state in (State.JOINING, State.MISSING):
            worker.state, worker.why = State.SERVING, ""
            _log.info("worker %s serves: %d programs at once, level %s", worker.address, worker.slots, status.level)
        self._changed()
