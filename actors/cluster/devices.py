"""Sets the order of GPUs in a process: its assigned GPU comes first, so that it is always device 0.

Ray makes only one GPU visible to an actor. On ROCm that breaks IPC between processes on one GPU, and RCCL in vLLM
(`deploy/rocm.env` links the reports). There Ray is set not to mask GPUs, and every process sets a mask with all GPUs.
"""

import os
from collections.abc import Mapping, Sequence

KINDS = ("HIP", "CUDA")
"""HIP first: if Ray sets neither mask, as on ROCm, vLLM copies HIP's mask to CUDA's and refuses two that differ."""


def own_first(own: Sequence[str], others: Sequence[str]) -> str:
    """A mask with all GPUs of a node, those of the process first."""
    return ",".join([*own, *(gpu for gpu in others if gpu not in own)])


def mask_for(environment: Mapping[str, str], *, own: Sequence[str], num_gpus: int) -> dict[str, str]:
    """Variables to add to `environment`; empty if Ray sets the mask, or if the process has no GPU.

    `own`: ids of GPUs that Ray assigned to this process; `num_gpus`: number of GPUs of its node.
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
    """Set the mask of this actor; has no effect after a library has counted the GPUs."""
    import ray

    own = [str(gpu) for gpu in ray.get_gpu_ids()]
    if not own:
        return
    here = ray.get_runtime_context().get_node_id()
    gpus = sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == here)
    os.environ.update(mask_for(os.environ, own=own, num_gpus=int(gpus)))
