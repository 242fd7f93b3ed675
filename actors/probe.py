"""What an actor says of itself when the run's detector asks whether it is there, and how it is asked."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from actors.birth import birth
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded

LOOK_S = 10.0
"""How long an actor that is late may take to say that it is there."""
AVAILABLE_AGAIN_S = 0.5
"""Between two questions to an actor that starts again."""

ORPHAN_S = 20.0
"""How long a process whose raylet is gone is left to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One answer. By its process it can be ended, and no other."""

    life: str  # of this process; a restarted actor has another
    node_id: str
    pid: int
    birth: str  # of that process (`actors.birth`): ids are given again
    work: int = 0  # what it has to do
    progress: int = 0  # another number than before where it got on
    children: tuple[int, ...] = ()  # processes of its own that it waits for, by their ids
    lines: tuple[str, ...] = ()  # what people should be shown since the last one
    loses: str = ""  # what is gone with it where it dies
    memory_bytes: int = 0  # of the process and its children, see `own_memory_bytes`
    device_bytes: int = 0  # the most that it has held on its GPU


class Alive:
    """Made once by an actor; `sign` answers a probe."""

    def __init__(self) -> None:
        self.life = uuid4().hex[:12]
        self._node_id = ray.get_runtime_context().get_node_id()
        self._birth = birth(os.getpid())
        end_with_parent()

    def sign(
        self,
        *,
        work: int = 0,
        progress: int = 0,
        children: tuple[int, ...] = (),
        lines: tuple[str, ...] = (),
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
            lines=lines,
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


async def life_of(worker: Any, patience_s: float) -> str | None:
    """Which life of the actor answers; None where none does within this time: it died, or starts again."""
    asked = when_available(worker.probe.remote)
    try:
        return (await within(asked, patience_s, waiter="driver", owner="worker", reason="a sign", poll=True)).life
    except (RayActorError, DeadlineExceeded):
        return None


async def when_available(call: Callable[[], Awaitable[Any]]) -> Any:
    """Ask until the actor answers: one that Ray starts again is unavailable for a while. Bound it with `within`."""
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            await asyncio.sleep(AVAILABLE_AGAIN_S)


async def until_up(
    name: str,
    actor: Any,
    call: Callable[[], Awaitable[Any]],
    seconds: float,
    *,
    reason: str,
    show: Callable[[str], None],
) -> Any:
    """What an actor answers in its first start, in which Ray starts it again where it dies.

    One that is late and was never heard of may be stopped: it is killed, and what starts in its place has as long.
    """
    try:
        return await within(when_available(call), seconds, waiter="driver", owner=name, reason=reason)
    except DeadlineExceeded as late:
        if isinstance(late, RayTaskError) or await life_of(actor, LOOK_S) is not None:
            raise
    show(f"{name} did not come up, silent for {seconds:g} s: what starts in its place is waited for")
    await asyncio.to_thread(ray.kill, actor, no_restart=False)
    return await within(when_available(call), seconds, waiter="driver", owner=name, reason=reason)


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
