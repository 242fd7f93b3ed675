"""vLLM's own configuration, made from a scale's arguments on a pretended GPU: one line of JSON.

python tests/actors/pretended_gpu.py cuda gpu-8 FOLDER

vLLM's compiled parts for GPUs are not in its CPU wheel, whose own need AVX-512; no configuration calls them.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

COMPILED = (
    "_C",
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_rocm_C",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
GPUS: dict[str, tuple[str, tuple[int, int], str, int]] = {
    "cuda": ("NVIDIA H100 80GB HBM3", (9, 0), "", 80 * 2**30),
    "rocm": ("AMD Instinct MI300X", (9, 4), "gfx942:sramecc+:xnack-", 192 * 2**30),
}


def pretend(kind: str) -> None:
    """Replace what vLLM asks torch and its platform about the GPU."""
    name, capability, architecture, memory_bytes = GPUS[kind]
    for part in COMPILED:
        sys.modules.setdefault(f"vllm.{part}", ModuleType(f"vllm.{part}"))
    device = SimpleNamespace(gcnArchName=architecture, total_memory=memory_bytes)
    patched: Any = torch
    patched.version.cuda, patched.version.hip = ("13.0", None) if kind == "cuda" else (None, "7.2.1")
    patched.cuda.get_device_properties = lambda *_: device
    patched.cuda.device_count = lambda: 1

    from vllm import platforms
    from vllm.platforms.interface import DeviceCapability

    if kind == "cuda":
        from vllm.platforms.cuda import NonNvmlCudaPlatform as Platform
    else:
        from vllm.platforms import rocm
        from vllm.platforms.rocm import RocmPlatform as Platform

        every = rocm._get_backend_priorities  # importing those of a quantised KV cache needs Triton
        rocm._get_backend_priorities = lambda *args: [one for one in every(*args) if "QUANT" not in one.name]
    answers = {
        "get_device_capability": DeviceCapability(*capability),
        "get_device_name": name,
        "get_device_total_memory": memory_bytes,
        "device_count": 1,
        "is_cumem_allocator_available": True,
    }

    def always(answer: Any) -> Any:
        return classmethod(lambda cls, *args, **kwargs: answer)

    methods = {method: always(answer) for method, answer in answers.items()}
    patched_platforms: Any = platforms
    patched_platforms._current_platform = type("Pretended", (Platform,), methods)()

    from vllm.model_executor.models import registry  # modules that it imports bind the current platform

    def save_nothing(*_: object) -> None:
        """In place of vLLM's cache of model classes: writing it imports modules that call the compiled parts."""

    lazy: Any = registry._LazyRegisteredModel
    lazy._save_modelinfo_to_cache = save_nothing


def attention_backend(made: Any) -> str:
    """What vLLM takes for the model's layers."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = made.model_config
    heads = model.get_num_attention_heads(made.parallel_config)
    with set_current_vllm_config(made):
        backend = get_attn_backend(model.get_head_size(), model.dtype, "auto", attn_type="decoder", num_heads=heads)
    return backend.get_name()


def main() -> None:
    kind, scale, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    pretend(kind)
    from vllm.engine.arg_utils import AsyncEngineArgs

    from actors.generation.vllm_start import engine_arguments
    from actors.weights.adapter_folder import AdapterSettings
    from recipes.stage1 import STAGE_1
    from rstar_ray.config.scales import at_scale

    config = at_scale(STAGE_1.paper, scale, STAGE_1.tiny)
    made = AsyncEngineArgs(**engine_arguments(config, folder, None)).create_engine_config()
    adapter = AdapterSettings(base=str(folder), rank=32, alpha=32)
    with_lora = AsyncEngineArgs(**engine_arguments(config, folder, adapter)).create_engine_config()
    print(
        json.dumps(
            {
                "batched_tokens": made.scheduler_config.max_num_batched_tokens,
                "chunked_prefill": made.scheduler_config.enable_chunked_prefill,
                "running": made.scheduler_config.max_num_seqs,
                "graphs": made.compilation_config.cudagraph_mode.name,
                "block_size": made.cache_config.block_size,
                "prefix_caching": made.cache_config.enable_prefix_caching,
                "attention": attention_backend(made),
                "worker": made.parallel_config.worker_cls,
                "sleeps": made.model_config.enable_sleep_mode,
                "lora_rank": with_lora.lora_config.max_lora_rank if with_lora.lora_config else 0,
            }
        )
    )


if __name__ == "__main__":
    main()
