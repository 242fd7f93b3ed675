"""What is read of a node, and what is asked for."""

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
"""Of a limit, as the kernel says it."""


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    WRONG = "WRONG"
    NOT_HERE = "-"  # does not apply to this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One judgement about one node."""

    check: str
    node: str
    verdict: Verdict
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """What to look for."""

    run_dir: str = ""
    """must be seen by every node"""
    model: str = ""
    """a Hugging Face folder that every node must read"""
    level: Isolation = SandboxConfig().level
    """isolation that sandboxes must reach"""
    checkpoints: Annotated[int, at_least(1)] = CheckpointConfig().keep + 1
    """on the disk at once: --checkpoint.keep, and the one being written"""
    gpus: Annotated[int, at_least(0)] = 0
    """every node must show as many; 0: as many as it has"""
    gpu_memory_share: Annotated[float, within("(0, 0.95]")] = EngineConfig().gpu_memory_share
    """--engine.gpu-memory-share of the run: vLLM does not start where less of a GPU is free"""
    probes: bool = True
    """try a pair of processes and a sandbox; without, only read"""
    run_config: str = ""
    """a run's settings as TOML, such as RUN/stage1.toml: check these too, and what they name"""
    mark: Annotated[str, tyro.conf.Suppress] = ""  # written into the run directory, for every node to find

    def __post_init__(self) -> None:
        check_bounds("", self)
        for option, path in (("--run-dir", self.run_dir), ("--model", self.model)):
            require(not path or Path(path).is_absolute(), option, f"{path!r} is relative", "give an absolute path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Something that was tried."""

    worked: bool
    message: str
    leaked_bytes: int = 0  # each round


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as torch sees it."""

    name: str
    capability: tuple[int, int]  # of CUDA; of ROCm the digits of gfx
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder as one node sees it."""

    problem: str = ""  # why it cannot be used
    mark: str = ""  # what was found of the asker's mark
    free_bytes: int = 0
    content: str = ""  # of a model: digest of its configuration, and of the names and sizes of its weights
    weight_bytes: int = 0  # of a model
    read_bytes_s: float = math.inf  # of a model's weights, while the other nodes read too


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node, as a process of Ray on it sees it."""

    node: str
    accelerator: Accelerator
    gpus: int = 0  # device files
    visible_gpus: int = 0  # as torch counts them
    gpu_facts: tuple[GpuFacts, ...] = ()  # of the visible ones
    gpu_problem: str = ""  # why torch cannot use a GPU here
    driver: str = ""  # version of the kernel's module; empty: none
    rocm: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])  # of packages that must agree
    other_versions: tuple[str, ...] = ()  # packages outside of the ranges of pyproject.toml
    torch_build: str = "cpu"  # "cpu", "cuda 13.0", "hip 7.2"
    target: str = ""  # of `make setup`; empty: another environment
    import_problem: str = ""  # of the environment, as actors/preflight/imports.py finds it
    compiler: str = ""  # for C, which Triton calls; empty: none
    python_headers: bool = True
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    shm_bytes: int = 0  # of /dev/shm
    memory_bytes: int = 0
    descriptors: int = 0  # open at once
    locked_memory: int = 0  # bytes that may be pinned
    ipc_lock: bool = False  # the capability CAP_IPC_LOCK, which lifts that limit
    clock_offset_s: float = 0.0  # to the asker's, halved round trip taken off
    sandbox: Probe | None = None  # None: not tried
    all_reduce: Probe | None = None
    ipc: Probe | None = None
    attention: Probe | None = None
    run_dir: Folder | None = None
    model: Folder | None = None
