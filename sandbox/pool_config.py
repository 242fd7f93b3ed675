"""How a pool runs, and what it has done."""

import sys
from dataclasses import dataclass, field

from rstar_ray.config import SandboxConfig
from rstar_ray.errors import ConfigError
from sandbox.isolation import IsolationLevel
from sandbox.jail import preload


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How one pool runs; `pool_config` makes it. Raises ConfigError for what cannot work."""

    level: str  # required; what cannot reach it refuses to start ...
    allow_landlock: bool  # ... unless this accepts `landlock` where namespaces are refused
    slots: int  # programs running at once; 0: one per core
    queue_size: int  # calls waiting at most
    deadline_s: float  # a call's default deadline, queue included
    attempts: int  # cells that a call may lose before it fails
    spare_cells: int  # idle cells per kind of server beyond one per slot
    calls_per_cell: int  # then it is replaced
    cells_per_server: int  # likewise
    flavors: tuple[str, ...]  # kinds of warm server
    python: str  # the interpreter of the programs

    def __post_init__(self) -> None:
        if self.level not in tuple(IsolationLevel):
            raise ConfigError("level", f"{self.level!r} is no isolation level", f"use one of {list(IsolationLevel)}")
        for name, low in (("slots", 0), ("queue_size", 1), ("attempts", 1), ("calls_per_cell", 1), ("spare_cells", 0)):
            if getattr(self, name) < low:
                raise ConfigError(name, f"{getattr(self, name)} is too small", f"use {low} or more")
        if preload.LEAN not in self.flavors:
            raise ConfigError("flavors", f"{self.flavors} lacks {preload.LEAN!r}", "add it: programs fall back on it")


def pool_config(config: SandboxConfig) -> PoolConfig:
    """The pool of one executor of a run, or of a sandbox used alone."""
    return PoolConfig(
        level=IsolationLevel.PROCESS if config.level == "process" else IsolationLevel.NAMESPACES,
        allow_landlock=config.level == "landlock",
        slots=config.slots,
        queue_size=config.max_waiting,
        deadline_s=config.deadline_s,
        attempts=config.attempts,
        spare_cells=config.spare_cells,
        calls_per_cell=config.calls_per_cell,
        cells_per_server=config.cells_per_server,
        flavors=config.warm,
        python=sys.executable,
    )


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
    cells_replaced: int  # by age, or because a program left something in its folder
    cells_lost: int  # died or wedged
    servers_lost: int
    waiting_s: float  # summed over calls: accepted to started
    running_s: float  # summed: started to finished
    timed_out_s: float  # the part of running_s that went to time-outs
    servers_memory_bytes: int  # peak resident, all warm servers
