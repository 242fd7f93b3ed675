"""What is read of a node, and what is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from actors.cluster.gpu_environment import Accelerator
from rstar_ray.config import CheckpointConfig, SandboxConfig
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
    said: str
    mend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to look for; empty means that nobody asked."""

    run_dir: str = ""
    model: str = ""  # a Hugging Face folder
    level: Isolation = SandboxConfig().level
    checkpoints: int = CheckpointConfig().keep + 1  # on the disk at once: those kept, and the one being written
    mark: str = ""  # what the asker wrote into the run directory, for every node to find
    gpus: int = 0  # every node must show as many; 0: as many as it has
    probe: bool = True  # pairs of processes, and a sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Something that was tried."""

    worked: bool
    said: str
    leaked_bytes: int = 0  # each round


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder as one node sees it."""

    problem: str = ""  # why it cannot be used
    mark: str = ""  # what was found of the asker's mark
    free_bytes: int = 0
    content: str = ""  # of a model: digest of its configuration, and of the names and sizes of its weights
    weight_bytes: int = 0  # of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node, as a process of Ray on it sees it."""

    node: str
    accelerator: Accelerator
    gpus: int = 0  # device files
    visible_gpus: int = 0  # as torch counts them
    driver: str = ""  # version of the kernel's module; empty: none
    rocm: str = ""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])  # of packages that must agree
    torch_build: str = "cpu"  # "cpu", "cuda 13.0", "hip 7.2"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    shm_bytes: int = 0  # of /dev/shm
    memory_bytes: int = 0
    descriptors: int = 0  # open at once
    locked_memory: int = 0  # bytes that may be pinned
    clock_offset_s: float = 0.0  # to the asker's, halved round trip taken off
    sandbox: Probe | None = None  # None: not tried
    all_reduce: Probe | None = None
    ipc: Probe | None = None
    attention: Probe | None = None
    run_dir: Folder | None = None
    model: Folder | None = None
