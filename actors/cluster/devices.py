"""The order of GPUs in a process: its own GPU first, so that device 0 is its own everywhere.

Ray leaves an actor with one visible GPU. On ROCm that breaks IPC between processes on one GPU and RCCL under
vLLM (`deploy/rocm.env` names the reports). There Ray sets no mask, and every process sets one with all GPUs.
"""

import os
from collections.abc import Mapping, Sequence

KINDS = ("HIP", "CUDA")
"""HIP first: where both are left alone, as on ROCm, vLLM takes HIP's mask for CUDA's and refuses two that differ."""


def own_first(own: Sequence[str], others: Sequence[str]) -> str:
    """A mask with all GPUs of a node, the process's own first."""
    return ",".join([*own, *(gpu for gpu in others if gpu not in own)])


def mask_for(environment: Mapping[str, str], *, own: Sequence[str], num_gpus: int) -> dict[str, str]:
    """What to add to `environment`: nothing where Ray has set the mask itself, or where no GPU is one's own.

    `own`: the ids Ray gave this process; `num_gpus`: of its node.
    """
    left_alone = [kind for kind in KINDS if _is_set(environment, f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES")]
    if not own or not left_alone:
        return {}
    name = f"{left_alone[0]}_VISIBLE_DEVICES"
    there = environment.get(name, "")
    return {name: own_first(own, there.split(",") if there else [str(gpu) for gpu in range(num_gpus)])}


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true")


def see_own_gpu_first() -> None:
    """To be called in an actor before anything counts the GPUs; afterwards it has no effect."""
    import ray

    own = [str(gpu) for gpu in ray.get_gpu_ids()]
    if not own:
        return
    here = ray.get_runtime_context().get_node_id()
    gpus = sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == here)
    os.environ.update(mask_for(os.environ, own=own, num_gpus=int(gpus)))
