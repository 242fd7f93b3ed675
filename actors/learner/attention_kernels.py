"""Selects PyTorch's attention kernels for the process, and tests them once on a GPU.

If no fused kernel supports a model's heads, PyTorch silently falls back to its math kernel. That kernel stores a score
for every head and pair of tokens: 129 GB for 40 heads at 16K tokens. A GPU without a fused kernel is therefore refused.
"""

from typing import Any

import torch
from torch.backends import cuda as kernels

from actors.learner.row_attention import Heads, attend
from rstar_ray.config import LearnerConfig
from rstar_ray.errors import ConfigError, one_line

PROBE_ROWS = (100, 156)  # tokens: two lengths, as in a packed micro batch


def choose(device: torch.device) -> None:
    """Set the kernels of this process. The math kernel is on for CPUs only: they lack fused kernels for some masks.

    cuDNN's attention is off: it builds and caches a plan for every new row length.
    """
    kernels.enable_cudnn_sdp(False)
    kernels.enable_math_sdp(device.type == "cpu")


def refuse_unfit(learner: LearnerConfig, model: Any, device: torch.device) -> None:
    """Raises `ConfigError` if the GPU has no fused kernel for these heads; `model`: a model's configuration."""
    if device.type == "cpu":
        return
    heads, head_dim = model.num_attention_heads, head_dim_of(model)
    kv_heads = getattr(model, "num_key_value_heads", heads)
    if problem := tried(heads, kv_heads, head_dim, getattr(torch, learner.dtype), device):
        raise ConfigError(
            "--model",
            f"this GPU has no fused attention for {heads} heads of {head_dim} in {learner.dtype} ({problem})",
            "use vLLM's own image, whose torch is built for the GPU, or another --learner.dtype",
        )


def tried(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Run attention forward and backward over packed rows; returns PyTorch's error, or an empty string."""
    tokens = sum(PROBE_ROWS)
    try:
        query, key, value = (
            torch.zeros((1, number, tokens, head_dim), dtype=dtype, device=device, requires_grad=True)
            for number in (heads, kv_heads, kv_heads)
        )
        attend(Heads(query, key, value), row_lengths=PROBE_ROWS).sum().backward()
    except (RuntimeError, AssertionError) as failed:  # AssertionError: torch is built without CUDA
        return one_line(failed)
    return ""


def head_dim_of(model: Any) -> int:
    """Head dimension of a model's configuration."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
