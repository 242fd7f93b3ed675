"""What an actor says of itself when the run's detector asks whether it is there."""

import os
from dataclasses import dataclass
from uuid import uuid4

import psutil
import ray


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One answer. By its process it can be ended, and no other."""

    life: str  # of this process; a restarted actor has another
    node_id: str
    pid: int
    created_s: float  # when the process began, since the epoch: ids of processes are given again
    work: int = 0  # what it has to do
    progress: int = 0  # another number than before where it got on
    children: tuple[int, ...] = ()  # processes of its own that it waits for, by their ids
    lines: tuple[str, ...] = ()  # what people should be shown since the last one


class Alive:
    """Made once by an actor; `sign` answers a probe."""

    def __init__(self) -> None:
        self.life = uuid4().hex[:12]
        self._node_id = ray.get_runtime_context().get_node_id()
        self._created_s = psutil.Process().create_time()

    def sign(
        self, *, work: int = 0, progress: int = 0, children: tuple[int, ...] = (), lines: tuple[str, ...] = ()
    ) -> Sign:
        return Sign(
            life=self.life,
            node_id=self._node_id,
            pid=os.getpid(),
            created_s=self._created_s,
            work=work,
            progress=progress,
            children=children,
            lines=lines,
        )
