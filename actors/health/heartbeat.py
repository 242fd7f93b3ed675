"""The heartbeat that an actor returns when the watchdog probes it."""

import contextlib
import functools
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import ray

from actors.cluster.process_start import start_time
from rstar_ray.logs import RecordBuffer

ORPHAN_S = 20.0
"""Time that a process without a raylet has to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The answer to one probe. It identifies the process, so that no other one is killed."""

    incarnation: str  # id of this process; a restarted actor has another
    node_id: str
    pid: int
    start_time: str  # of that process (`actors.cluster.process_start`), because pids are reused
    progress: int = 0  # changes with every step of work
    children: tuple[int, ...] = ()  # pids of child processes that it waits for
    records: tuple[logging.LogRecord, ...] = ()  # logged since the last heartbeat
    lost_with_it: str = ""  # description of the state that is lost if this process dies
    memory_bytes: int = 0  # of the process and its children, see `own_memory_bytes`
    device_bytes: int = 0  # peak memory on its GPU

    @property
    def is_here(self) -> bool:
        """Whether its process runs on this node."""
        return ray.is_initialized() and self.node_id == ray.get_runtime_context().get_node_id()

    def kill(self) -> None:
        """SIGKILL its process on this node, unless the pid belongs to a later process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if start_time(self.pid) == self.start_time:
                process.kill()


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """Id of this actor process, and the log records for its next heartbeat."""

    incarnation: str = field(default_factory=lambda: uuid4().hex[:12])
    buffer: RecordBuffer = field(default_factory=RecordBuffer)


@functools.cache
def this_process() -> ActorProcess:
    """The first call makes this process end with its raylet, and collects its log records for heartbeats."""
    process = ActorProcess()
    process.buffer.install()
    end_with_parent()
    return process


def heartbeat(*, children: tuple[int, ...] = (), **facts: Any) -> Heartbeat:
    """The heartbeat of this actor process; `facts` are fields of `Heartbeat`."""
    process = this_process()
    return Heartbeat(
        incarnation=process.incarnation,
        node_id=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        start_time=start_time(os.getpid()),
        children=children,
        records=process.buffer.take(),
        memory_bytes=own_memory_bytes(os.getpid(), *children),
        **facts,
    )


def end_with_parent(after_s: float = ORPHAN_S, every_s: float = ORPHAN_S / 10) -> None:
    """End this process `after_s` after its parent. Ray's workers end with their raylet, unless the head is stopped or
    unreachable, when they wait for it."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        time.sleep(after_s)
        os._exit(1)

    threading.Thread(target=look, name="parent", daemon=True).start()


def own_memory_bytes(*pids: int) -> int:
    """Resident memory of these processes without shared pages, such as those of Ray's object store.

    A process that has ended, or whose memory is not reported, counts 0.
    """
    held = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(pid).memory_info()
            held += found.rss - getattr(found, "shared", 0)
    return held


def runnable_wait_s(pid: int) -> dict[str, float]:
    """Seconds that each thread of this process has waited for a core since it began; empty if unknown.

    Source: the second number of `/proc/<pid>/task/<tid>/schedstat` (Linux, Documentation/scheduler/sched-stats).
    """
    waited: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                waited[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waited


def starved_s(before: dict[str, float], now: dict[str, float]) -> float:
    """The longest wait of one thread for a core between two calls of `runnable_wait_s`."""
    return max((waited - before[thread] for thread, waited in now.items() if thread in before), default=0.0)
