"""Checks of one node. Each is a pure function of the node's facts and returns a finding with a hint."""

from collections.abc import Callable

from actors.cluster.gpu_environment import DEPLOY, gpu_environment, read_env_file
from actors.preflight.facts import UNLIMITED, Finding, NodeFacts, PreflightOptions, Probe, Verdict
from actors.preflight.imports import BUILDS

LEAST_ROCM = (7, 2, 2)
"""First version in which graph capture works with RCCL."""
LEAST_DRIVER = {13: (580,), 12: (525, 60)}
"""NVIDIA driver, by CUDA major version of torch's build (source: CUDA minor version compatibility)."""
LEAST_CAPABILITY = (8, 0)
"""Ampere: bfloat16 and flash attention."""
FREE_SHARE = 0.9
"""Share of a GPU's memory; if less is free, another process uses the GPU."""
DESCRIPTORS = 65_536
SHM_SHARE = 0.3
"""Of the node's memory: /dev/shm holds Ray's object store and the weights that the node's engines share."""
LEAST_SHM_BYTES = 2**30
TRAINED_OVER_WEIGHTS = 7.0
"""Bytes of a checkpoint (float32 weights, two moments, model: 12 + 2 per parameter) over the model's (2)."""
GB = 1e9

Check = Callable[[NodeFacts, PreflightOptions], Finding]


def check_node(facts: NodeFacts, options: PreflightOptions) -> list[Finding]:
    """Findings of every check, in the order in which problems should be fixed."""
    return [check(facts, options) for check in CHECKS]


def driver(facts: NodeFacts, options: PreflightOptions) -> Finding:
    if facts.accelerator == "cpu":
        if options.gpus:
            hint = "start the container with its GPUs: deploy/docker/rocm.Dockerfile has the line"
            return _found("driver", facts, Verdict.WRONG, f"no device file of a GPU, {options.gpus} wanted", hint)
        if facts.target in ("cuda", "rocm"):  # a head node, or a container started without its GPUs
            message = f"no GPU here: no device file, and this environment is for {facts.target}"
            return _found("driver", facts, Verdict.WARNING, message, "run on a machine with GPUs; docker: --gpus all")
        return _not_here("driver", facts, "no GPU")
    module = "amdgpu" if facts.accelerator == "rocm" else "nvidia"
    if not facts.driver:
        return _found(
            "driver", facts, Verdict.WRONG, f"{module} is not loaded", f"install the driver, modprobe {module}"
        )
    built = _numbers(facts.torch_build.partition(" ")[2])
    least = LEAST_DRIVER.get(built[0], ()) if facts.accelerator == "cuda" and built else ()
    if _numbers(facts.driver) < least:
        wanted = ".".join(map(str, least))
        hint = f"install NVIDIA's driver {wanted} or newer on the host: torch is built for {facts.torch_build}"
        return _found("driver", facts, Verdict.WRONG, f"nvidia {facts.driver}, {wanted} or newer wanted", hint)
    return _found("driver", facts, Verdict.OK, f"{module} {facts.driver}")


def runtime(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """Version of ROCm, or of the CUDA that torch includes."""
    if facts.accelerator == "cpu":
        return _not_here("runtime", facts, "no GPU")
    if facts.accelerator == "cuda":
        return _found("runtime", facts, Verdict.OK, f"torch for {facts.torch_build}")
    if not facts.rocm:
        hint = "use the image of deploy/docker/rocm.Dockerfile"
        return _found("runtime", facts, Verdict.WARNING, "no /opt/rocm/.info/version", hint)
    if _numbers(facts.rocm) < LEAST_ROCM:
        wanted = ".".join(map(str, LEAST_ROCM))
        return _found("runtime", facts, Verdict.WRONG, f"ROCm {facts.rocm}", f"use ROCm {wanted} or newer")
    return _found("runtime", facts, Verdict.OK, f"ROCm {facts.rocm}")


def gpus(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """Whether torch can use every GPU: compute capability and free memory."""
    if facts.accelerator == "cpu":
        return _not_here("GPUs", facts, "no GPU")
    if facts.gpu_problem:
        return _found("GPUs", facts, Verdict.WRONG, f"torch: {facts.gpu_problem}", "see driver, packages and masks")
    for number, gpu in enumerate(facts.gpu_facts):
        if facts.accelerator == "cuda" and gpu.capability < LEAST_CAPABILITY:
            has, wanted = ".".join(map(str, gpu.capability)), ".".join(map(str, LEAST_CAPABILITY))
            message = f"GPU {number} ({gpu.name}) has compute capability {has}, {wanted} or higher wanted"
            return _found("GPUs", facts, Verdict.WRONG, message, "use an A100, L40S, H100 or newer")
    used = [
        (share, number, gpu)
        for number, gpu in enumerate(facts.gpu_facts)
        if (share := gpu.free_bytes / gpu.memory_bytes) < FREE_SHARE
    ]
    if used:
        share, number, gpu = min(used, key=lambda one: one[0])
        verdict = Verdict.WRONG if share < options.gpu_memory_share else Verdict.WARNING
        wanted = options.gpu_memory_share * gpu.memory_bytes / GB
        message = f"GPU {number} has {gpu.free_bytes / GB:.1f} GB free of {gpu.memory_bytes / GB:.1f}"
        message += f"; an engine needs {wanted:.1f} (--engine.gpu-memory-share {options.gpu_memory_share:g})"
        return _found("GPUs", facts, verdict, message, "end the process that holds the rest (nvidia-smi, rocm-smi)")
    kinds = ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpu_facts))
    return _found("GPUs", facts, Verdict.OK, kinds or "not looked at")


def compiler(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """Triton compiles the launcher of each kernel with the system's C compiler."""
    if facts.accelerator == "cpu":
        return _not_here("compiler", facts, "nothing is compiled without a GPU")
    lacking = [] if facts.compiler else ["gcc"]
    lacking += [] if facts.python_headers else ["Python.h"]
    if lacking:
        hint = "apt-get install gcc python3-dev (of this Python's version)"
        return _found("compiler", facts, Verdict.WARNING, f"no {' and no '.join(lacking)}: Triton needs it", hint)
    return _found("compiler", facts, Verdict.OK, facts.compiler)


def packages(facts: NodeFacts, options: PreflightOptions) -> Finding:
    lacking = [name for name in ("ray", "torch", "vllm", "deepspeed") if not facts.versions.get(name)]
    if lacking:
        target = facts.accelerator
        hint = f"make setup TARGET={target}"
        return _found("packages", facts, Verdict.WRONG, f"{', '.join(lacking)} not installed", hint)
    if facts.accelerator != "cpu" and not facts.torch_build.startswith(BUILDS[facts.accelerator]):
        hint = "make clean, then make setup TARGET=" + facts.accelerator + "; never install torch over vLLM's image"
        return _found("packages", facts, Verdict.WRONG, f"torch is built for {facts.torch_build}", hint)
    if facts.import_problem:
        hint = f"make clean, then make setup TARGET={facts.target or facts.accelerator}"
        return _found("packages", facts, Verdict.WRONG, facts.import_problem, hint)
    if facts.other_versions:
        hint = "an image with these versions, or `make setup` outside of an image"
        return _found("packages", facts, Verdict.WARNING, ", ".join(facts.other_versions), hint)
    versions = ", ".join(f"{name} {facts.versions[name]}" for name in ("ray", "torch", "vllm", "deepspeed"))
    return _found("packages", facts, Verdict.OK, f"{versions} ({facts.torch_build})")


def masks(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """*_VISIBLE_DEVICES variables that hide a GPU or make `import ray` fail."""
    if facts.accelerator == "cpu":
        return _not_here("masks", facts, "no GPU")
    set_here = [f"{kind}_VISIBLE_DEVICES" for kind in ("ROCR", "HIP", "CUDA")]
    there = {name: facts.environment[name] for name in set_here if name in facts.environment}
    shown = ", ".join(f"{name}={value}" for name, value in there.items())
    hint = f"unset {' '.join(there)} before Ray starts (deploy/slurm.sh does)"
    if "ROCR_VISIBLE_DEVICES" in there and "HIP_VISIBLE_DEVICES" not in there:
        return _found("masks", facts, Verdict.WRONG, f"{shown}: with it alone `import ray` fails", hint)
    wanted = options.gpus or facts.gpus
    if facts.visible_gpus < wanted:
        why = shown or "no mask is set: the group of the device files?"
        hint = hint if there else "give the user the groups video and render (--group-add)"
        # Without --gpus, `wanted` counts device files, some of which may not be compute GPUs.
        verdict = Verdict.WRONG if options.gpus or not facts.visible_gpus else Verdict.WARNING
        return _found("masks", facts, verdict, f"{facts.visible_gpus} of {wanted} GPUs are visible; {why}", hint)
    return _found("masks", facts, Verdict.OK, f"{facts.visible_gpus} of {facts.gpus} GPUs are visible")


def environment(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """Compare variables with deploy/rocm.env or deploy/cuda.env, and reject those that the file lists as harmful."""
    if facts.accelerator == "cpu":
        return _not_here("environment", facts, "no GPU")
    name = f"deploy/{facts.accelerator}.env"
    harmful = read_env_file(DEPLOY / f"{facts.accelerator}.env").harmful
    masks_apart = {variable: why for variable, why in harmful.items() if not variable.endswith("_VISIBLE_DEVICES")}
    for variable, why in masks_apart.items():
        if variable in facts.environment:
            return _found("environment", facts, Verdict.WRONG, f"{variable} is set: {why}", f"unset {variable}")
    wanted = gpu_environment(facts.accelerator)
    unset = [variable for variable in wanted if variable not in facts.environment]
    if unset:
        hint = f"set -a; . {name}; set +a before `ray start`, or --env-file {name}"
        return _found("environment", facts, Verdict.WRONG, f"not set: {', '.join(unset)}", hint)
    other = [f"{variable}={facts.environment[variable]}" for variable in wanted if _differs(facts, wanted, variable)]
    if other:
        return _found(
            "environment", facts, Verdict.WARNING, f"differs from {name}: {', '.join(other)}", "if not intended"
        )
    return _found("environment", facts, Verdict.OK, f"as in {name}")


def shared_memory(facts: NodeFacts, options: PreflightOptions) -> Finding:
    wanted = max(LEAST_SHM_BYTES, SHM_SHARE * facts.memory_bytes if facts.accelerator != "cpu" else 0)
    size = f"/dev/shm has {facts.shm_bytes / GB:.1f} GB"
    if facts.shm_bytes < wanted:
        hint = "--ipc host or --shm-size (Docker); emptyDir with medium Memory at /dev/shm (Kubernetes)"
        verdict = Verdict.WRONG if facts.shm_bytes < LEAST_SHM_BYTES else Verdict.WARNING
        return _found("shared memory", facts, verdict, f"{size}, {wanted / GB:.1f} wanted", hint)
    return _found("shared memory", facts, Verdict.OK, size)


def descriptors(facts: NodeFacts, options: PreflightOptions) -> Finding:
    if facts.descriptors != UNLIMITED and facts.descriptors < DESCRIPTORS:
        severe = Verdict.WRONG if facts.accelerator != "cpu" else Verdict.WARNING
        hint = f"ulimit -n {DESCRIPTORS} before `ray start`; --ulimit nofile={DESCRIPTORS} (Docker)"
        return _found("descriptors", facts, severe, f"limit {facts.descriptors}, {DESCRIPTORS} wanted", hint)
    return _found("descriptors", facts, Verdict.OK, _limit(facts.descriptors))


def locked_memory(facts: NodeFacts, options: PreflightOptions) -> Finding:
    if facts.accelerator == "cpu":
        return _not_here("locked memory", facts, "nothing is pinned without a GPU")
    if facts.ipc_lock:
        return _found("locked memory", facts, Verdict.OK, "no limit (CAP_IPC_LOCK)")
    if facts.locked_memory != UNLIMITED:
        hint = (
            "ulimit -l unlimited; --ulimit memlock=-1 (Docker); IPC_LOCK (Kubernetes); PropagateResourceLimits (Slurm)"
        )
        message = f"{facts.locked_memory} bytes may be pinned; RDMA and pinned copies want no limit"
        return _found("locked memory", facts, Verdict.WARNING, message, hint)
    return _found("locked memory", facts, Verdict.OK, "no limit")


def sandbox(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """Whether the sandbox reaches the requested isolation level."""
    if facts.sandbox is None:
        return _not_here("sandbox", facts, "not tried")
    if facts.sandbox.worked:
        return _found("sandbox", facts, Verdict.OK, facts.sandbox.message)
    hint = (
        "allow namespaces: --security-opt seccomp=unconfined --security-opt apparmor=unconfined (Docker); "
        "seccompProfile and appArmorProfile Unconfined (Kubernetes); sysctl user.max_user_namespaces above 0 and "
        "kernel.apparmor_restrict_unprivileged_userns=0 (hosts of Slurm); or accept --sandbox.level landlock"
    )
    return _found("sandbox", facts, Verdict.WRONG, facts.sandbox.message, hint)


def all_reduce(facts: NodeFacts, options: PreflightOptions) -> Finding:
    hint = "set NCCL_DEBUG=INFO to log the cause; check HSA_NO_SCRATCH_RECLAIM and /dev/shm first"
    return _tried("all-reduce", facts, facts.all_reduce, hint)


def ipc(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """Whether a process can open another's GPU memory handle, and whether that leaks memory."""
    probe = facts.ipc
    if probe is not None and probe.worked and probe.leaked_bytes > 0:
        message = f"{probe.leaked_bytes / 2**20:.1f} MiB leak in each round"
        hint = "HSA_ENABLE_IPC_MODE_LEGACY=1 before Ray starts" if facts.accelerator == "rocm" else "restart the driver"
        return _found("IPC", facts, _failed(facts), message, hint)
    hint = "every process must see every GPU (deploy/rocm.env); --ipc host (Docker)"
    return _tried("IPC", facts, probe, hint)


def attention(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """Whether a fused kernel works; the fallback keeps an attention score for every pair of tokens in memory."""
    if facts.accelerator == "cpu":
        return _not_here("attention", facts, "no GPU")
    hint = "use vLLM's own image, whose torch is built for this GPU"
    return _tried("attention", facts, facts.attention, hint)


def disk(facts: NodeFacts, options: PreflightOptions) -> Finding:
    """Whether the run directory's disk has room for the checkpoints."""
    folder, model = facts.run_dir, facts.model
    if folder is None or folder.problem:
        return _not_here("disk", facts, "no run directory; set one with --run-dir")
    free = f"{folder.free_bytes / GB:.0f} GB free"
    if model is None or not model.weight_bytes:
        return _found("disk", facts, Verdict.OK, f"{free}; set --model to compute the size of a checkpoint")
    wanted = options.checkpoints * TRAINED_OVER_WEIGHTS * model.weight_bytes
    message = f"{free}, {options.checkpoints} checkpoints take {wanted / GB:.0f} GB"
    if folder.free_bytes < wanted:
        return _found("disk", facts, Verdict.WRONG, message, "a larger disk, or a lower --checkpoint.keep")
    return _found("disk", facts, Verdict.OK, message)


def _tried(check: str, facts: NodeFacts, probe: Probe | None, hint: str) -> Finding:
    if probe is None:
        return _not_here(check, facts, "not tried")
    if probe.worked:
        return _found(check, facts, Verdict.OK, probe.message)
    return _found(check, facts, _failed(facts), probe.message, hint)


def _failed(facts: NodeFacts) -> Verdict:
    """Verdict of a failed probe. On a GPU it is only a warning, because the probe itself may be wrong there, and a job
    that starts with `preflight && run` would never start. The run's own start-up checks refuse what cannot work."""
    return Verdict.WRONG if facts.accelerator == "cpu" else Verdict.WARNING


def _differs(facts: NodeFacts, wanted: dict[str, str], variable: str) -> bool:
    return facts.environment[variable] != wanted[variable]


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 7.2.2-99 is (7, 2, 2)."""
    parts = version.partition("-")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _limit(value: int) -> str:
    return "no limit" if value == UNLIMITED else str(value)


def _found(check: str, facts: NodeFacts, verdict: Verdict, message: str, hint: str = "") -> Finding:
    return Finding(check=check, node=facts.node, verdict=verdict, message=message, hint=hint)


def _not_here(check: str, facts: NodeFacts, message: str) -> Finding:
    return _found(check, facts, Verdict.NOT_HERE, message)


CHECKS: tuple[Check, ...] = (
    driver,
    runtime,
    gpus,
    packages,
    compiler,
    masks,
    environment,
    shared_memory,
    descriptors,
    locked_memory,
    sandbox,
    all_reduce,
    ipc,
    attention,
    disk,
)
