"""Which of PyTorch's kernels compute attention: chosen for the process, tried once, and refused where they do not fit.

PyTorch takes the mathematical path without a word where no fused kernel takes a model's heads (the likeliest on ROCm),
and at 16K tokens that path wants more memory than a GPU has. So it is only taken where it is asked for.
"""

from typing import Any

import torch
from torch.backends import cuda as kernels
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rstar_ray.algorithm.state_bytes import SCORE_BYTES, scores_bytes
from rstar_ray.config import RunConfig
from rstar_ray.errors import ConfigError

GB = 1e9
OPTION = "--learner.attention-kernel"
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
PROBE_TOKENS = 256


def choose(kernel: str, device: torch.device) -> None:
    """For this process, from now on. Raises `ConfigError` for `aiter` without ROCm.

    On a GPU the mathematical path is shut where it was not asked for; a CPU has no fused kernel for every mask.
    """
    if kernel == "aiter":
        if torch.version.hip is None:
            raise ConfigError(OPTION, "aiter's kernels are ROCm's, and this torch is not", "give fused")
        kernels.preferred_rocm_fa_library("ck")
    eager = kernel == "eager"
    kernels.enable_flash_sdp(not eager)
    kernels.enable_mem_efficient_sdp(not eager)
    kernels.enable_cudnn_sdp(not eager)
    kernels.enable_math_sdp(eager or device.type == "cpu")


def refuse_unfit(config: RunConfig, model: Any, device: torch.device) -> None:
    """Raise `ConfigError` where a GPU has no fused kernel for the model's heads, or no room for its scores."""
    learner = config.learner
    if device.type == "cpu" or learner.attention == "flash_attention_2":
        return
    heads, head_dim = model.num_attention_heads, head_dim_of(model)
    scores = scores_bytes(
        heads, micro_batch_tokens=learner.micro_batch_tokens, longest_tokens=config.engine.max_context_tokens
    )
    room = float(torch.cuda.get_device_properties(device).total_memory)
    if learner.attention_kernel == "eager":
        refuse_scores(scores, room, told=_told(config, heads))
        return
    said = tried(heads, getattr(model, "num_key_value_heads", heads), head_dim, getattr(torch, learner.dtype), device)
    if said:
        raise ConfigError(
            OPTION,
            f"no fused attention for {heads} heads of {head_dim} in {learner.dtype} here ({said}), and the "
            f"mathematical path would hold {_told(config, heads)} = {scores / GB:.1f} GB of {room / GB:.0f}",
            "take vLLM's own image, give --learner.attention flash_attention_2 where it is installed, or eager with "
            "shorter rows and smaller --learner.micro-batch-tokens",
        )


def refuse_scores(scores: float, room: float, *, told: str) -> None:
    """Raise `ConfigError` where one layer's scores alone are more than a GPU has; bytes both."""
    if scores > room:
        raise ConfigError(
            OPTION,
            f"eager holds {told} = {scores / GB:.1f} GB of scores, and the GPU has {room / GB:.0f}",
            "give fused, or shorter rows (--engine.max-context-tokens) and smaller --learner.micro-batch-tokens",
        )


def tried(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Forward and backward through fused kernels alone; what torch said against it, nothing where it went."""
    shape = (1, heads, PROBE_TOKENS, head_dim)
    query = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    key = torch.zeros((1, kv_heads, *shape[2:]), dtype=dtype, device=device, requires_grad=True)
    try:
        with sdpa_kernel(FUSED):
            out = scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=heads != kv_heads)
        out.sum().backward()
    except RuntimeError as refused:
        return " ".join(str(refused).split())[:120]
    return ""


def head_dim_of(model: Any) -> int:
    """Of a model's configuration."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def _told(config: RunConfig, heads: int) -> str:
    longest = config.engine.max_context_tokens
    widest = max(config.learner.micro_batch_tokens, longest)
    return f"{heads} heads x {widest} x {longest} tokens x {SCORE_BYTES} bytes"
