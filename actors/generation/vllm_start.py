"""Starts a vLLM engine; translates our settings into vLLM's arguments and environment.

vLLM is imported when an engine starts, after the environment that it reads is set.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from actors.generation.owner import owned_by_this
from actors.generation.vllm_private import ray_stat_logger
from actors.weights.adapter_folder import AdapterSettings, target_modules
from actors.weights.transfer import BACKEND
from rstar_ray.config import EngineConfig, RunConfig
from rstar_ray.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ObserveFn = Callable[[Any, Any], None]
"""Called after every step with vLLM's scheduler statistics and iteration statistics; either may be None."""

STEADY_HEAP = {
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "MALLOC_ARENA_MAX": "1",
}
"""glibc keeps freed memory instead of returning it to the system: 1 page fault per decode step instead of 131. All
threads share one heap, because the heaps of other threads return memory in any case, and preparing new weights in a
thread would cause page faults throughout."""


def start_vllm(config: RunConfig, model: Path, adapter: AdapterSettings | None, observe: ObserveFn) -> "AsyncLLM":
    """Import vLLM, start its processes and load the model; blocks for seconds."""
    refuse_sleep_on_rocm(config)
    os.environ.update(engine_environment(config) | owned_by_this())
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = WeightTransferConfig(backend=BACKEND)
    arguments = AsyncEngineArgs(**engine_arguments(config, model, adapter), weight_transfer_config=transfer)
    loggers = [_stat_logger(observe), *([ray_stat_logger()] if config.engine.vllm_metrics else [])]
    return AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)


def eos_token_ids(model: Path) -> list[int]:
    """The folder's end-of-sequence tokens: only these end a completion early."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        if path.is_file() and (eos := json.loads(path.read_text()).get("eos_token_id")) is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    raise EngineError(f"{model} names no eos_token_id in generation_config.json or config.json")


def engine_environment(config: RunConfig) -> dict[str, str]:
    """Environment that vLLM reads when it is imported, here and in the processes that it starts."""
    everywhere = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    level = "ERROR" if _on_cpu() else "INFO"  # on a GPU the start logs useful facts: memory, KV blocks, graphs
    everywhere["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", level)
    return everywhere | (_cpu_environment(config.engine) if _on_cpu() else _gpu_environment(config))


def refuse_sleep_on_rocm(config: RunConfig) -> None:
    """Raise `ConfigError` for sleep mode on ROCm, where vLLM starts but fails when it wakes (deploy/rocm.env)."""
    import torch

    if config.sleeps and torch.version.hip is not None:
        raise ConfigError(
            "--engine.sleep",
            f"vLLM's sleep mode is not reliable on ROCm (got torch for ROCm {torch.version.hip})",
            "give --engine.no-sleep, and an --engine.gpu-memory-share beside an update (recipes/plan.py)",
        )


def _cpu_environment(engine: EngineConfig) -> dict[str, str]:
    """Environment on CPUs. Engines share a machine's cores, so they are not bound to cores.

    One rank needs no separate worker process. Without Dynamo vLLM does not compile a small function at the first step,
    which saves a C++ compiler, 2.8 s of CPU time and 25 MB.
    """
    one_rank = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if engine.tensor_parallel == 1 else {}
    eager = {"TORCHDYNAMO_DISABLE": "1"} if engine.eager else {}
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(engine.num_threads)}
    return STEADY_HEAP | one_rank | eager | threads


def _gpu_environment(config: RunConfig) -> dict[str, str]:
    """Environment on GPUs. `deterministic` selects vLLM's kernels whose results do not depend on the batch.

    Every GPU has a separate cache of compiled graphs, because vLLM overwrites its index in place, and an engine that
    starts at the same time could read an incomplete file.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES") or "0"
    root, name = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser(), f"gpu-{mask.split(',')[0]}"
    cache = {"VLLM_CACHE_ROOT": str(root if root.name == name else root / name)}
    return cache | ({"VLLM_BATCH_INVARIANT": "1"} if config.deterministic else {})


def _on_cpu() -> bool:
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def engine_arguments(config: RunConfig, model: Path, adapter: AdapterSettings | None) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`, except `weight_transfer_config`."""
    engine = config.engine
    return {
        "model": adapter.base if adapter is not None else str(model),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling settings come only from the request
        "dtype": engine.dtype,
        "seed": config.seed,
        "max_model_len": engine.max_context_tokens,
        "block_size": engine.block_size,
        "num_gpu_blocks_override": engine.num_blocks,
        "max_num_seqs": engine.max_running,
        # `from_engine_args` defaults to 2,048: vLLM's larger defaults are for its server and LLM class.
        "max_num_batched_tokens": max(engine.max_batched_tokens, engine.max_running),
        "gpu_memory_utilization": engine.gpu_memory_share,
        "enforce_eager": engine.eager,
        "enable_sleep_mode": config.sleeps,
        "tensor_parallel_size": engine.tensor_parallel,
        "distributed_executor_backend": executor_backend(engine),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,  # vLLM's loggers; ours is passed to `from_engine_args`
        "use_tqdm_on_load": False,
        "worker_extension_cls": "actors.weights.vllm_worker.WorkerExtension",
        **({"hf_overrides": {"head_dtype": "float32"}} if config.float32_head else {}),
        **_lora_arguments(adapter),
        **(_cpu_args(engine, model) if _on_cpu() else {}),
    }


def _lora_arguments(adapter: AdapterSettings | None) -> dict[str, Any]:
    """Arguments for one adapter, only on the layers that the learner adapts."""
    if adapter is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank),
        "lora_target_modules": target_modules(Path(adapter.base)),
    }


def executor_backend(engine: EngineConfig) -> Literal["uni", "mp"]:
    """ "mp" (processes of this machine) for several ranks, "uni" (no extra process) for one rank.

    In a placement group vLLM would choose its `ray` executor for several ranks, which needs one bundle per rank; here
    a replica's GPUs are in one bundle.
    """
    return "uni" if engine.tensor_parallel == 1 else "mp"


def _cpu_args(engine: EngineConfig, model: Path) -> dict[str, Any]:
    """Additional arguments for the CPU backend.

    Chunked prefill is off: vLLM 0.32 rewinds a seeded request's generator after a partial prefill, which fails for
    torch's CPU generators and ends the engine. A given size of the KV cache skips the run that measures it.
    """
    num_blocks = engine.num_blocks
    sized = {} if num_blocks is None else {"kv_cache_memory_bytes": _kv_bytes(model, num_blocks * engine.block_size)}
    prefill = engine.max_context_tokens + engine.max_running  # the longest prompt beside a full batch of decodes
    return sized | {"enable_chunked_prefill": False, "max_num_batched_tokens": max(prefill, 2048)}


def _kv_bytes(model: Path, num_tokens: int) -> int:
    """Upper bound (float32) of the bytes of so many tokens; the number of blocks determines the allocation."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 4 * heads * head_dim * config["num_hidden_layers"]
    return token_bytes * num_tokens


def _stat_logger(observe: ObserveFn) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadLogger(StatLoggerBase):
        """Passes every step's statistics to `observe`."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            observe(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None: ...

    return LoadLogger
