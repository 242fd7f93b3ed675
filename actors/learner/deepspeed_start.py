"""Process group rendezvous of the ranks, and start of a DeepSpeed engine around a policy."""

import contextlib
import logging
import os
import random
import warnings
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]  # torch documents both

from actors.learner.optimizer import RefusingAdamW
from actors.learner.policy import Policy
from rstar_ray.algorithm.state_bytes import GRADIENTS, REDUCE_BUCKET
from rstar_ray.config import LearnerConfig, OptimizerConfig
from rstar_ray.errors import LearnerError

DEEPSPEED_NAMES = {"float32": "fp32", "bfloat16": "bf16"}


def learner_device(learner: LearnerConfig) -> torch.device:
    """The GPU visible to this process, or the CPU; for the CPU it also sets `DS_ACCELERATOR`."""
    if learner.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return torch.device("cpu")


def open_store(learner: LearnerConfig, host: str) -> TCPStore:
    """Rendezvous store of the ranks. It holds its port from now on, so that no other process can take it."""
    deadline = timedelta(seconds=learner.start_deadline_s)
    return TCPStore(host, 0, learner.ranks, is_master=True, timeout=deadline, wait_for_workers=False)


def join_ranks(learner: LearnerConfig, rank: int, device: torch.device, store: Any) -> None:
    """Join the process group; `store`: the rendezvous store, or its (host, port) on the other ranks."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(learner.ranks), LOCAL_RANK="0")  # DeepSpeed reads them
    if dist.is_initialized():
        if dist.get_world_size() != learner.ranks:
            raise LearnerError(f"this process already belongs to a group of {dist.get_world_size()} ranks")
        return
    if learner.ranks == 1:
        store = HashStore()
    elif isinstance(store, tuple):
        host, port = store
        deadline = timedelta(seconds=learner.start_deadline_s)
        store = TCPStore(host, port, learner.ranks, is_master=False, timeout=deadline)
    if learner.ranks > 1:
        os.environ.update(MASTER_ADDR=store.host, MASTER_PORT=str(store.port))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=learner.ranks,
        timeout=timedelta(seconds=learner.step_deadline_s),
        device_id=device if device.type == "cuda" else None,  # else a barrier uses the rank as the GPU index
    )


def seed_generators(seed: int) -> None:
    """Seed the default generators of torch, numpy and Python."""
    random.seed(seed % 2**32)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**32)


def compute_deterministically() -> None:
    """For the whole process; torch raises for an operation without a deterministic implementation."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def partitioned_loading(learner: LearnerConfig, adam: OptimizerConfig) -> Generator[None]:
    """Within it transformers loads a model as the partitions of ZeRO-3: one module at a time is whole in memory.

    Rank 0 reads the weights and broadcasts them. With one rank or another ZeRO stage it has no effect.
    """
    if learner.zero < 3 or learner.ranks == 1:
        yield
        return
    _quiet_deepspeed(learner)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig(deepspeed_config(learner, adam))  # transformers has only a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del kept


def start_deepspeed(policy: Policy, learner: LearnerConfig, adam: OptimizerConfig) -> tuple[Any, RefusingAdamW]:
    """The DeepSpeed engine around the policy, and its optimizer."""
    deepspeed = _quiet_deepspeed(learner)
    optimizer = RefusingAdamW(parameter_groups(policy, adam.weight_decay), **optimizer_arguments(learner, adam))
    if learner.zero == 0:
        optimizer.clip_here = adam.grad_clip
    config = deepspeed_config(learner, adam)
    engine = deepspeed.initialize(model=policy, optimizer=optimizer, config=config, dist_init_required=False)[0]
    end_collectives_after(learner.step_deadline_s)
    return engine, optimizer


def end_collectives_after(seconds: float) -> None:
    """Set the timeout of all process groups; DeepSpeed creates its own with torch's default (10 or 30 minutes)."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _quiet_deepspeed(learner: LearnerConfig) -> Any:
    """Import DeepSpeed with only its errors logged; by default it logs every setting at start."""
    with contextlib.redirect_stdout(None):
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if learner.device == "cpu":
        # Disable shared-memory collectives for CPU inference: unused here, and their first compilation takes minutes.
        # Not on a GPU: DeepSpeed does not use them there, and reading this table would probe every operation.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def parameter_groups(policy: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """One group without weight decay; with it two, so that vectors (norms, biases) have none."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if not weight_decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    return [
        {"params": [p for p in parameters if _dimensions(p) > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if _dimensions(p) <= 1], "weight_decay": 0.0},
    ]


def _dimensions(parameter: nn.Parameter) -> int:
    """Of the whole parameter, also where ZeRO-3 has partitioned it."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def optimizer_arguments(learner: LearnerConfig, adam: OptimizerConfig) -> dict[str, Any]:
    """AdamW's arguments, besides the parameters and their weight decay."""
    return {
        "lr": 0.0,  # set at every update
        "betas": (adam.beta1, adam.beta2),
        "eps": adam.epsilon,
        "fused": learner.device == "cuda" or learner.offload,  # offloaded: torch's fused AdamW for CPUs
    }


def deepspeed_config(learner: LearnerConfig, adam: OptimizerConfig) -> dict[str, Any]:
    """DeepSpeed's config. It declares one micro batch per step: `OptimizerSteps` does the accumulation and scaling."""
    on_gpu = learner.device == "cuda"
    zero: dict[str, Any] = {"stage": learner.zero, "overlap_comm": on_gpu, "reduce_bucket_size": REDUCE_BUCKET}
    if learner.copy_ranks > 1:
        zero["zero_hpz_partition_size"] = learner.copy_ranks
    if learner.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0 if learner.zero == 0 else adam.grad_clip,
        "steps_per_print": None,
    }
    if learner.dtype == "bfloat16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        # Of rotary embeddings: bfloat16 would change every position. Only a model loaded in partitions needs it named.
        kept = ["inv_freq"]
        config["data_types"] = {"grad_accum_dtype": DEEPSPEED_NAMES[GRADIENTS], "keep_in_fp32_modules": kept}
        config["communication_data_type"] = DEEPSPEED_NAMES[learner.reduce_dtype]
    return config
