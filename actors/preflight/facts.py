"""Facts about a node, findings, and the options of preflight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import tyro

from actors.cluster.gpu_environment import Accelerator
from rstar_ray.config import CheckpointConfig, EngineConfig, SandboxConfig
from rstar_ray.config.checks import at_least, check_bounds, require, within
from rstar_ray.config.machines import Isolation

UNLIMITED = -1
"""The kernel's value for a resource without a limit."""


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    WRONG = "WRONG"
    NOT_HERE = "-"  # does not apply to this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check on one node."""

    check: str
    node: str
    verdict: Verdict
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """Command line of preflight."""

    run_dir: str = ""
    """run directory, which every node must see"""
    model: str = ""
    """Hugging Face model folder, which every node must be able to read"""
    level: Isolation = SandboxConfig().level
    """isolation level that the sandbox must reach"""
    checkpoints: Annotated[int, at_least(1)] = CheckpointConfig().keep + 1
    """checkpoints on disk at once: --checkpoint.keep, and the one being written"""
    gpus: Annotated[int, at_least(0)] = 0
    """GPUs that every node must have; 0: as many as it has"""
    gpu_memory_share: Annotated[float, within("(0, 0.95]")] = EngineConfig().gpu_memory_share
    """--engine.gpu-memory-share of the run: vLLM does not start if less of a GPU is free"""
    probes: bool = True
    """also test communication between two processes, the sandbox and the GPU's attention kernel"""
    run_config: str = ""
    """a run's settings as TOML, such as RUN/stage1.toml: check them, and the files they name, too"""
    mark: Annotated[str, tyro.conf.Suppress] = ""  # content of a file in the run directory that every node must see

    def __post_init__(self) -> None:
        check_bounds("", self)
        for option, path in (("--run-dir", self.run_dir), ("--model", self.model)):
            require(not path or Path(path).is_absolute(), option, f"{path!r} is relative", "give an absolute path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Result of an operation that was tried."""

    worked: bool
    message: str
    leaked_bytes: int = 0  # per round


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as torch sees it."""

    name: str
    capability: tuple[int, int]  # CUDA compute capability; for ROCm the digits of gfx
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder as one node sees it."""

    problem: str = ""  # why it cannot be used
    mark: str = ""  # content of the mark file that this node found
    free_bytes: int = 0
    content: str = ""  # digest; for a model of its configuration, and the names and sizes of its weights
    weight_bytes: int = 0  # for a model
    read_bytes_s: float = math.inf  # for a model: read rate of its weights while the other nodes read too


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about one node, as a Ray process on it sees them."""

    node: str
    accelerator: Accelerator
    gpus: int = 0  # device files
    visible_gpus: int = 0  # as torch counts them
    gpu_facts: tuple[GpuFacts, ...] = ()  # of the visible GPUs
    gpu_problem: str = ""  # why torch cannot use a GPU here
    driver: str = ""  # version of the kernel module; empty: none
    rocm: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])  # of packages that must agree
    other_versions: tuple[str, ...] = ()  # packages outside the ranges of pyproject.toml
    torch_build: str = "cpu"  # "cpu", "cuda 13.0", "hip 7.2"
    target: str = ""  # TARGET of `make setup`; empty: another environment
    import_problem: str = ""  # found by actors/preflight/imports.py
    compiler: str = ""  # path of the C compiler, which Triton calls; empty: none
    python_headers: bool = True
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    shm_bytes: int = 0  # of /dev/shm
    memory_bytes: int = 0
    descriptors: int = 0  # open at once
    locked_memory: int = 0  # bytes that may be pinned
    ipc_lock: bool = False  # has the capability CAP_IPC_LOCK, which lifts that limit
    clock_offset_s: float = 0.0  # from the driver's clock, corrected by half the round trip
    sandbox: Probe | None = None  # None: not tried
    all_reduce: Probe | None = None
    ipc: Probe | None = None
    attention: Probe | None = None
    run_dir: Folder | None = None
    model: Folder | None = None
