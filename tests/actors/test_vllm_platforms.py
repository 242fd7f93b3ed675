"""What vLLM makes of the scales' settings on an H100 and on an MI300X: its own configuration, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.gpu_environment import Accelerator, gpu_environment
from tests.actors import pretended_gpu

REPOSITORY = Path(__file__).parent.parent.parent
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768, "dtype": "bfloat16", "eos_token_id": 0, "tie_word_embeddings": False,
    "hidden_size": 5_120, "intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "scale", "sleeps", "attention"),
    [("cuda", "gpu-8", True, "FLASH_ATTN"), ("rocm", "mi300x-64", False, "ROCM_ATTN")],
)
def test_vllm_makes_of_a_scale_what_is_meant(
    kind: Accelerator, scale: str, sleeps: bool, attention: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_14B))
    command = [sys.executable, pretended_gpu.__file__, kind, scale, str(tmp_path)]
    deployed = gpu_environment(kind)  # expandable segments beside sleep mode, among others
    quiet = {"PYTHONPATH": str(REPOSITORY), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env={**os.environ, **deployed, **quiet}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2_000:]
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert made == {
        "batched_tokens": 8_192,  # left out, vLLM takes 2,048
        "chunked_prefill": True,
        "running": 256,
        "graphs": "FULL_AND_PIECEWISE",
        "block_size": 32,
        "prefix_caching": True,
        "attention": attention,
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "sleeps": sleeps,
        "lora_rank": 32,
    }
