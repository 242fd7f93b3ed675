"""The four scales: model, placement and budgets. The other settings of a recipe do not depend on the scale."""

import os
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from rstar_ray.config import RunConfig, with_values
from rstar_ray.errors import ConfigError

TINY: dict[str, Any] = {
    "engine.replicas": 1,  # two on two cores take twice as long: a decode step costs the same for half the batch
    "engine.cpus_per_replica": 0.8,
    "engine.dtype": "float32",
    "engine.max_context_tokens": 2_048,
    "engine.kv_tokens": 65_536,
    "engine.max_running": 256,
    "learner.ranks": 2,
    "learner.cpus_per_rank": 0.4,
    "learner.zero": 1,
    "learner.dtype": "float32",
    "learner.micro_batch_tokens": 2_048,
    "learner.activation_checkpointing": False,
    "sandbox.slots": 8,  # more than cores, since programs wait for cores beside the engine: 1.3 x faster than 4
    "sandbox.time_limit_s": 1.0,
    "sandbox.memory_mb": 256,
    "rollout.instruct": False,
    "rollout.max_response_tokens": 256,
    "rollout.max_turns": 8,
    "rollout.deadline_s": 180.0,
    "prompts_per_step": 32,
    "algorithm.rollouts_per_prompt": 8,
    "algorithm.keep": 4,
    "algorithm.least_failures": 2,  # with 8 rollouts, the paper's floor(n_neg / 2) would keep 0 of 1 failure
    "optimizer.learning_rate": 3e-4,
    "optimizer.warmup_steps": 5,
    "optimizer.beta2": 0.95,  # a run of a few hundred steps needs short averages
    "sft.steps": 1_000,
    "sft.schedule": "wsd",  # copying emerges late in some runs, when a cosine schedule has decayed
    "sft.batch_size": 32,
    "sft.learning_rate": 3e-3,
    "sft.num_conversations": 8_000,
    "evaluate.samples": 4,
    "evaluate.temperature": 1.0,
    "evaluate.max_response_tokens": 512,
    "evaluate.max_turns": 8,
    "checkpoint.every_steps": 10,
    "detector.probe_every_s": 1.0,
    "detector.silent_s": 10.0,
    "detector.learner_silent_s": 10.0,
    "detector.engine_step_s": 10.0,
    "detector.node_away_s": 120.0,
    "detector.still_s": 960.0,  # an engine may take --engine.start-deadline-s to come up
}
"""Two cores, no GPU, no download: Qwen3's architecture with 0.6M random weights."""

GPU: dict[str, Any] = {
    "engine.replicas": 1,
    "engine.gpus_per_replica": 0.5,
    "engine.cpus_per_replica": 2.0,
    "engine.gpu_memory_share": 0.45,
    "learner.ranks": 1,
    "learner.gpus_per_rank": 0.5,
    "learner.cpus_per_rank": 1.5,
    "sandbox.slots": 8,
    "prompts_per_step": 32,
    "sft.batch_size": 128,
}
"""One GPU shared by an engine and a learner rank; more GPUs by --engine.replicas and --learner.ranks."""

MI300X_64: dict[str, Any] = {
    "engine.replicas": 64,
    "engine.gpus_per_replica": 0.5,
    "engine.cpus_per_replica": 4.0,
    "engine.gpu_memory_share": 0.68,
    "learner.ranks": 64,
    "learner.gpus_per_rank": 0.5,
    "learner.cpus_per_rank": 2.0,
    "learner.zero": 3,
    "sandbox.executors": 8,
    "sandbox.slots": 64,
}
"""8 nodes x 8 MI300X: every GPU holds a learner rank and a TP-1 engine, without sleep mode."""

GPU_8: dict[str, Any] = {
    "engine.replicas": 8,
    "engine.gpus_per_replica": 0.5,
    "engine.cpus_per_replica": 4.0,
    "engine.gpu_memory_share": 0.8,
    "engine.sleep": True,  # engine and update take turns; at the same time a 14B model would leave little memory for KV
    "learner.ranks": 8,
    "learner.gpus_per_rank": 0.5,
    "learner.cpus_per_rank": 2.0,
    "learner.zero": 3,
    "learner.offload": True,  # needed for 14B beside an engine in 80 GB; turn it off with more memory
    "learner.micro_batch_tokens": 16_384,
    "sandbox.slots": 32,
    "prompts_per_step": 64,
}
"""One node of eight GPUs of 80 to 192 GB; every GPU holds a learner rank and a TP-1 engine."""

SCALES = {"tiny": TINY, "gpu": GPU, "gpu-8": GPU_8, "mi300x-64": MI300X_64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The smallest cluster that a scale is meant for."""

    nodes: int
    gpus: int  # per node
    cpus: int  # per node
    gpu_memory_gb: float = 0.0


MACHINES = {
    "tiny": Machines(nodes=1, gpus=0, cpus=2),
    "gpu": Machines(nodes=1, gpus=1, cpus=16, gpu_memory_gb=80),
    "gpu-8": Machines(nodes=1, gpus=8, cpus=96, gpu_memory_gb=80),
    "mi300x-64": Machines(nodes=8, gpus=8, cpus=96, gpu_memory_gb=192),
}


def at_scale(paper: RunConfig, scale: str, tiny: dict[str, Any]) -> RunConfig:
    """The paper's stage at a scale; `tiny` holds the stage's overrides at scale tiny."""
    values = {**SCALES[scale], "scale": scale, **(tiny if scale == "tiny" else {})}
    return with_values(paper, values)


def detect_scale(resources: dict[str, float]) -> tuple[str, str]:
    """The scale that fits a Ray cluster's resources, and the reason."""
    gpus = resources.get("GPU", 0.0)
    if gpus >= 64:
        return "mi300x-64", f"the cluster has {gpus:g} GPUs"
    if gpus >= 8:
        return "gpu-8", f"the cluster has {gpus:g} GPUs"
    if gpus >= 1:
        return "gpu", f"the cluster has {gpus:g} GPUs"
    return "tiny", "the cluster has no GPU"


def local_resources(devices: Path = Path("/dev")) -> dict[str, float]:
    """The resources that a run has on this machine: GPUs that Ray would detect, unless the environment is for CPUs."""
    if made_for(Path(sys.prefix)) == "cpu":
        return {"GPU": 0.0}
    nvidia = len([path for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    amd = len(list((devices / "dri").glob("renderD*"))) if (devices / "kfd").exists() else 0
    mask = os.environ.get("CUDA_VISIBLE_DEVICES" if nvidia else "HIP_VISIBLE_DEVICES")
    names = mask.split(",") if mask is not None else ["0"] * (nvidia or amd)
    visible = takewhile(lambda name: name not in ("", "NoDevFiles") and not name.startswith("-"), names)
    return {"GPU": float(min(nvidia or amd, len(list(visible))))}


def made_for(environment: Path) -> str:
    """What `make setup` made the environment for: cpu, cuda or rocm; empty for other environments."""
    try:
        return (environment / ".target").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def check_gpu_here(config: RunConfig) -> None:
    """Raise `ConfigError` if the run would start Ray on this machine and needs a GPU that it does not have."""
    needs_gpu = config.engine.gpus_per_replica > 0 or config.learner.gpus_per_rank > 0
    if needs_gpu and not os.environ.get("RAY_ADDRESS") and not local_resources()["GPU"]:
        cpu = made_for(Path(sys.prefix)) == "cpu"
        reason = "this environment is for CPUs" if cpu else "none is visible on this machine"
        raise ConfigError(
            "--scale",
            f"{config.scale} needs a GPU, and {reason}",
            "choose --scale tiny, set RAY_ADDRESS to a cluster with GPUs, or run `make clean`, then `make setup "
            "TARGET=cuda` (or rocm)",
        )
