"""What an actor reports of itself when the run's detector probes it."""

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import ray

from actors.cluster.process_start import birth
from rstar_ray.logs import RecordBuffer

ORPHAN_S = 20.0
"""How long a process whose raylet is gone is left to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One answer. By its process it can be ended, and no other."""

    life: str  # of this process; a restarted actor has another
    node_id: str
    pid: int
    birth: str  # of that process (`actors.cluster.process_start`): ids are given again
    work: int = 0  # what it has to do
    progress: int = 0  # another number than before where it got on
    children: tuple[int, ...] = ()  # processes of its own that it waits for, by their ids
    records: tuple[logging.LogRecord, ...] = ()  # what it has logged since the last one
    loses: str = ""  # what is gone with it where it dies
    memory_bytes: int = 0  # of the process and its children, see `own_memory_bytes`
    device_bytes: int = 0  # the most that it has held on its GPU


class Alive:
    """Made once by an actor; `sign` answers a probe."""

    def __init__(self) -> None:
        self.life = uuid4().hex[:12]
        self._node_id = ray.get_runtime_context().get_node_id()
        self._birth = birth(os.getpid())
        self._buffer = RecordBuffer()
        self._buffer.install()
        end_with_parent()

    def sign(
        self,
        *,
        work: int = 0,
        progress: int = 0,
        children: tuple[int, ...] = (),
        loses: str = "",
        device_bytes: int = 0,
    ) -> Sign:
        return Sign(
            life=self.life,
            node_id=self._node_id,
            pid=os.getpid(),
            birth=self._birth,
            work=work,
            progress=progress,
            children=children,
            records=self._buffer.take(),
            loses=loses,
            memory_bytes=own_memory_bytes(os.getpid(), *children),
            device_bytes=device_bytes,
        )


def end_with_parent(after_s: float = ORPHAN_S, every_s: float = ORPHAN_S / 10) -> None:
    """Ray's workers end with their raylet, unless its head is stopped or cut off: then they wait for its answer."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        time.sleep(after_s)
        os._exit(1)

    threading.Thread(target=look, name="parent", daemon=True).start()


def own_memory_bytes(*pids: int) -> int:
    """Of these processes: what is resident, apart from what is shared, as pages of Ray's object store are.

    A process that is gone, or on a system that does not tell, has none.
    """
    held = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(pid).memory_info()
            held += found.rss - getattr(found, "shared", 0)
    return held


def waits_for_cores_s(pid: int) -> dict[str, float]:
    """How long each thread of this process has been ready to run and was not run, since it began; none where unknown.

    Source: the second figure of `/proc/<pid>/task/<tid>/schedstat` (Linux, Documentation/scheduler/sched-stats).
    """
    waited: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it ends meanwhile
                waited[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waited


def starved_s(before: dict[str, float], now: dict[str, float]) -> float:
    """The longest that one thread wanted a core and got none, between two looks at `waits_for_cores_s`."""
    return max((waited - before[thread] for thread, waited in now.items() if thread in before), default=0.0)
