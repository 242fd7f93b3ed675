"""All uses of vLLM's undocumented interface, for vLLM 0.32.0; adapt this module to use another version.

Functions import vLLM themselves, because vLLM reads its environment when it is imported. An attribute or module that
the installed vLLM does not have raises an `EngineError` with its name.
"""

import multiprocessing
import sys
from collections.abc import Iterable
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from rstar_ray.errors import EngineError

if TYPE_CHECKING:
    import torch
    from vllm.v1.engine.async_llm import AsyncLLM

VERSION = "0.32.0"
CORE_NAME = "EngineCore"
"""vLLM's name of its engine process; several processes have numbers appended."""


def attribute(owner: Any, path: str) -> Any:
    """The attribute at this dotted path. `owner` may be the name of a module. Raises `EngineError` if it is missing."""
    name = owner if isinstance(owner, str) else type(owner).__name__
    try:
        found = import_module(owner) if isinstance(owner, str) else owner
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as missing:
        version = getattr(sys.modules.get("vllm"), "__version__", "(none)")
        raise EngineError(
            f"vLLM {version} has no {name}.{path}, which is used as of vLLM {VERSION}. Hint: install "
            f"vLLM {VERSION}, or adapt actors/generation/vllm_private.py"
        ) from missing
    return found


# ---------------------------------------------------------------- in the process that starts an engine


def starting_cores() -> list[BaseProcess]:
    """Engine processes that vLLM has started from this process, which may have other children."""
    return [child for child in multiprocessing.active_children() if child.name.startswith(CORE_NAME)]


def core_pids(llm: "AsyncLLM") -> list[int]:
    """Process ids of vLLM's engine processes, after the start."""
    processes: Iterable[BaseProcess] = attribute(llm, "engine_core.resources.engine_manager.processes")
    return [process.pid for process in processes if process.pid]


def cache_sizes(llm: "AsyncLLM") -> tuple[int, int, int]:
    """Number of KV cache blocks for requests, tokens per block, and longest context in tokens."""
    cache = attribute(llm, "vllm_config.cache_config")
    num_blocks, block_size = attribute(cache, "num_gpu_blocks"), attribute(cache, "block_size")
    return num_blocks - 1, block_size, attribute(llm, "vllm_config.model_config.max_model_len")  # vLLM uses one block


async def pause_decoding(llm: "AsyncLLM", *, keep_kv: bool) -> None:
    """Pause between two decode steps; running requests continue later. Unless `keep_kv`, the prefix cache is emptied
    and the KV of running requests is computed again.

    `AsyncLLM.pause_generation` does the same, but then sleeps 20 ms, so that callers get the last outputs first.
    """
    await attribute(llm, "engine_core.pause_scheduler_async")(mode="keep", clear_cache=not keep_kv)


def refuse_without_prefix_salts(staleness: int) -> None:
    """Raise `EngineError` if vLLM's prompts do not accept a salt for cached prefixes."""
    try:
        fields = attribute("vllm.inputs", "TokensPrompt.__annotations__")
    except EngineError:
        fields = {}
    if "cache_salt" not in fields:
        version = getattr(sys.modules.get("vllm"), "__version__", "(none)")
        raise EngineError(
            f"--staleness: vLLM {version} has no cache_salt, without which cached KV may be older than the bound (got "
            f"{staleness}). Hint: install vLLM {VERSION}, or use --staleness 0"
        )


def expect_shutdown(llm: "AsyncLLM") -> None:
    """Stop vLLM's output handler, which would report the end of its process as a fault."""
    if (handler := attribute(llm, "output_handler")) is not None:
        handler.cancel()


def is_refusal(failed: Exception) -> bool:
    """Whether vLLM refused a request, by one of its errors or by a `ValueError` before accepting it."""
    generate_error = attribute("vllm.v1.engine.exceptions", "EngineGenerateError")
    cause = failed.__cause__ if isinstance(failed, generate_error) else failed
    return isinstance(cause, (attribute("vllm.exceptions", "VLLMClientError"), ValueError))


def ray_stat_logger() -> Any:
    """vLLM's logger to Ray's metrics.

    vLLM treats Ray without Ray Serve as not installed, although its logger needs Serve only to name Serve's replicas.
    """
    from ray.util import metrics

    wrappers: Any = import_module("vllm.v1.metrics.ray_wrappers")
    logger = attribute("vllm.v1.metrics.ray_wrappers", "RayPrometheusStatLogger")
    wrappers.ray_metrics = metrics
    return logger


# ---------------------------------------------------------------- in vLLM's worker processes


def loadable_names(model: "torch.nn.Module") -> set[str]:
    """Names of parameters as `load_weights` reports them; of tied parameters only the first.

    vLLM's LoRA layers hold the model's layers as `base_layer`.
    """
    return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}


def repack_tied_head(model: Any) -> None:
    """Repack a tied output head: on CPUs vLLM packs it separately for oneDNN, and its reload does not update it.

    Whether the head is tied is read from the parameters. vLLM's config does not show it if the folder saves the head
    too: vLLM ties it to the embeddings after finding that they are equal.
    """
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "quant_method") and "lm_head.weight" not in loadable_names(model):
        attribute(head, "quant_method.process_weights_after_loading")(head)


def use_fused_cpu_norm() -> None:
    """Use vLLM's fused RMSNorm on CPUs. vLLM's default there is several torch operations, a seventh of a decode step of
    a small model.

    Results differ only by rounding, except that without AVX-512 it truncates to bfloat16, and is not used for that.
    """
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    rounds_bfloat16 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    fused, plain = attribute(torch.ops._C, "fused_add_rms_norm"), attribute(torch.ops._C, "rms_norm")

    @RMSNorm.register_oot(name="RMSNorm")
    class CpuRMSNorm(RMSNorm):  # pyright: ignore[reportUnusedClass]  # registered with vLLM by the decorator
        """Root-mean-square norm; a residual is added first."""

        def forward_cpu(
            self, x: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            one_type = self.has_weight and x.dtype == self.weight.dtype
            rounds = x.dtype == torch.float32 or rounds_bfloat16
            if self.variance_size_override is not None or not one_type or not rounds:
                return self.forward_native(x, residual)
            x = x.contiguous()  # the kernels need contiguous rows; queries and keys are slices of one tensor
            if residual is not None:
                fused(x, residual, self.weight, self.variance_epsilon)
                return x, residual
            out = torch.empty_like(x)
            plain(out, x, self.weight, self.variance_epsilon)
            return out
