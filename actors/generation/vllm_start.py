"""Starts a vLLM engine: our settings as vLLM's arguments and environment.

Nothing here runs on import. vLLM is imported when an engine starts, after the environment that it reads is set.
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
"""glibc keeps what is freed instead of handing it back: 131 page faults a decode step become one. One heap for all
threads, since those of other threads than the first hand back all the same: a new version of the weights, which one of
them makes ready, would be all page faults."""


def start_vllm(config: RunConfig, model: Path, adapter: AdapterSettings | None, observe: ObserveFn) -> "AsyncLLM":
    """Blocks for seconds: imports vLLM, starts its processes, loads the model."""
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
    """The end-of-turn tokens that the folder names: only these end a completion early."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        if path.is_file() and (eos := json.loads(path.read_text()).get("eos_token_id")) is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    raise EngineError(f"{model} names no eos_token_id in generation_config.json or config.json")


def engine_environment(config: RunConfig) -> dict[str, str]:
    """Read by vLLM at its import here and in the processes it starts."""
    everywhere = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    level = "ERROR" if _on_cpu() else "INFO"  # a start on a GPU is worth reading: memory, KV blocks, graphs
    everywhere["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", level)
    return everywhere | (_cpu_environment(config.engine) if _on_cpu() else _gpu_environment(config))


def refuse_sleep_on_rocm(config: RunConfig) -> None:
    """vLLM would start there, and meet faults when it wakes (deploy/rocm.env). Raises `ConfigError`."""
    import torch

    if config.sleeps and torch.version.hip is not None:
        raise ConfigError(
            "--engine.sleep",
            f"vLLM's sleep mode is not reliable on ROCm (got torch for ROCm {torch.version.hip})",
            "give --engine.no-sleep, and an --engine.gpu-memory-share beside an update (recipes/plan.py)",
        )


def _cpu_environment(engine: EngineConfig) -> dict[str, str]:
    """Engines share a machine's cores, so none is bound to any; one rank needs no separate worker process.

    Without Dynamo one small function of vLLM's is not compiled at the first step: no C++ compiler is needed, and
    2.8 s of CPU time and 25 MB are saved.
    """
    one_rank = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if engine.tensor_parallel == 1 else {}
    eager = {"TORCHDYNAMO_DISABLE": "1"} if engine.eager else {}
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(engine.num_threads)}
    return STEADY_HEAP | one_rank | eager | threads


def _gpu_environment(config: RunConfig) -> dict[str, str]:
    """vLLM has kernels for GPUs that sum in a fixed order, whatever is decoded beside a sequence.

    Every GPU has its own cache of compiled graphs: vLLM writes the list of them in place, so that an engine that starts
    beside another could read half of it.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES") or "0"
    root, name = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser(), f"gpu-{mask.split(',')[0]}"
    cache = {"VLLM_CACHE_ROOT": str(root if root.name == name else root / name)}
    return cache | ({"VLLM_BATCH_INVARIANT": "1"} if config.deterministic else {})


def _on_cpu() -> bool:
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def engine_arguments(config: RunConfig, model: Path, adapter: AdapterSettings | None) -> dict[str, Any]:
    """What vLLM's `AsyncEngineArgs` is made of; ours alone decides sampling, and `weight_transfer_config` is added."""
    engine = config.engine
    return {
        "model": adapter.base if adapter is not None else str(model),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling comes from the request alone
        "dtype": engine.dtype,
        "seed": config.seed,
        "max_model_len": engine.max_context_tokens,
        "block_size": engine.block_size,
        "num_gpu_blocks_override": engine.num_blocks,
        "max_num_seqs": engine.max_running,
        # Left out, `from_engine_args` falls to 2,048: vLLM's larger defaults are for its own server and LLM class.
        "max_num_batched_tokens": max(engine.max_batched_tokens, engine.max_running),
        "gpu_memory_utilization": engine.gpu_memory_share,
        "enforce_eager": engine.eager,
        "enable_sleep_mode": config.sleeps,
        "tensor_parallel_size": engine.tensor_parallel,
        "distributed_executor_backend": executor_backend(engine),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,  # of vLLM's own loggers; ours is handed in
        "use_tqdm_on_load": False,
        "worker_extension_cls": "actors.weights.vllm_worker.WorkerExtension",
        **({"hf_overrides": {"head_dtype": "float32"}} if config.float32_head else {}),
        **_lora_arguments(adapter),
        **(_cpu_args(engine, model) if _on_cpu() else {}),
    }


def _lora_arguments(adapter: AdapterSettings | None) -> dict[str, Any]:
    """One adapter, wrapped around those layers alone that the learner adapts."""
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
    """Processes of this machine for a replica of several ranks, none for one of a single rank.

    Left to choose inside a placement group, vLLM takes its `ray` executor for several ranks, which wants one bundle for
    each and refuses ours: a replica's GPUs are one bundle.
    """
    return "uni" if engine.tensor_parallel == 1 else "mp"


def _cpu_args(engine: EngineConfig, model: Path) -> dict[str, Any]:
    """What the CPU backend needs on top.

    Chunked prefill is off: vLLM 0.32 rewinds a seeded request's generator after a partial prefill, which torch's CPU
    generators cannot do, and the engine dies of it. Stating the size of the KV cache skips the run that measures it.
    """
    num_blocks = engine.num_blocks
    sized = {} if num_blocks is None else {"kv_cache_memory_bytes": _kv_bytes(model, num_blocks * engine.block_size)}
    prefill = engine.max_context_tokens + engine.max_running  # the longest prompt beside a full batch of decodes
    return sized | {"enable_chunked_prefill": False, "max_num_batched_tokens": max(prefill, 2048)}


def _kv_bytes(model: Path, num_tokens: int) -> int:
    """At least what so many tokens take (as in float32); the number of blocks decides what is allocated."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 4 * heads * head_dim * config["num_hidden_layers"]
    return token_bytes * num_tokens


def _stat_logger(observe: ObserveFn) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadLogger(StatLoggerBase):
        """Hands every step's statistics on; keeps nothing."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            observe(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None: ...

    return LoadLogger
