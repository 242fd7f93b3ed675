"""Every setting is read by the program, and reaches vLLM, DeepSpeed and programs in the sandbox under their names."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from actors.generation.vllm_start import engine_arguments, engine_environment
from actors.learner.deepspeed_start import deepspeed_config, optimizer_arguments
from actors.learner.gang import rank_environment
from benchmarks.small import SMALL
from rstar_ray.config import RunConfig, SandboxConfig, leaves, with_values
from sandbox.limits import program_limits

REPOSITORY = Path(__file__).parent.parent
SHARED = {"engine.gpus_per_replica": 0.5, "learner.gpus_per_rank": 0.5}
HPZ = {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 10**8, "zero_hpz_partition_size": 2}
HPZ_UNUSED = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 10**8}
ROOMS = ("rstar_ray", "sandbox", "scheduler", "actors", "recipes")


def test_every_setting_is_read():
    read = _read()
    unread = [
        name for name in leaves(RunConfig()) if not {name.rpartition(".")[2], "--" + name.replace("_", "-")} & read
    ]
    assert unread == []


def _read() -> set[str]:
    """Attributes that the program reads, but for the checks of the settings themselves; and the strings in it."""
    found: set[str] = set()
    for path in (path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py")):
        nodes: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
                continue
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.parent.name != "config":
                found.add(node.value)
            nodes += ast.iter_child_nodes(node)
    return found


def changed_by(values: dict[str, Any], boundary: Any) -> dict[str, Any]:
    """What a change of settings changes of what is handed over at a boundary."""
    before, after = boundary(SMALL), boundary(with_values(SMALL, values))
    return {name: value for name, value in after.items() if before.get(name) != value}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what is read of a model's shape; engines on a GPU, whose arguments are the longer list."""
    shape = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr("actors.generation.vllm_start._on_cpu", lambda: False)
    return tmp_path


@pytest.mark.parametrize(
    ("values", "arrives"),
    [
        ({"engine.dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"seed": 7}, {"seed": 7}),
        ({"engine.max_context_tokens": 4_096}, {"max_model_len": 4_096}),
        ({"engine.block_size": 64}, {"block_size": 64}),
        ({"engine.kv_tokens": 3_200}, {"num_gpu_blocks_override": 101}),  # vLLM keeps one for itself
        ({"engine.max_running": 9}, {"max_num_seqs": 9}),
        ({"engine.max_batched_tokens": 4_096}, {"max_num_batched_tokens": 4_096}),
        ({"engine.gpu_memory_share": 0.3}, {"gpu_memory_utilization": 0.3}),
        ({"engine.gpus_per_replica": 1.0}, {"enforce_eager": False}),
        (SHARED | {"engine.sleep": True}, {"enforce_eager": False, "enable_sleep_mode": True}),
        ({"engine.gpus_per_replica": 1.0, "engine.sleep": True}, {"enforce_eager": False}),  # its GPU is its own
        ({"engine.gpus_per_replica": 1.0, "engine.compile": False}, {}),
        ({"engine.tensor_parallel": 2}, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
        ({"float32_head": True}, {"hf_overrides": {"head_dtype": "float32"}}),
    ],
)
def test_settings_reach_vllm(values: dict[str, Any], arrives: dict[str, Any], model: Path):
    def boundary(config: RunConfig) -> dict[str, Any]:
        return engine_arguments(config, model, None)

    assert changed_by(values, boundary) == arrives


@pytest.mark.parametrize(
    ("values", "arrives"),
    [
        ({"learner.zero": 2}, {"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 10**8}}),
        ({"optimizer.grad_clip": 0.5}, {"gradient_clipping": 0.5}),
        ({"learner.zero": 0}, {"gradient_clipping": 0.0}),  # without ZeRO the optimizer clips
        ({"learner.dtype": "bfloat16"}, {"bf16": {"enabled": True, "check_grad_overflow": True}}),
        ({"optimizer.beta1": 0.8, "optimizer.beta2": 0.9}, {"betas": (0.8, 0.9)}),
        ({"optimizer.epsilon": 1e-6}, {"eps": 1e-6}),
        ({"learner.gpus_per_rank": 1.0}, {"fused": True}),
        ({"learner.offload": True}, {"fused": True}),  # on the host, by torch's kernel for CPUs
        ({"learner.dtype": "bfloat16", "learner.reduce_dtype": "bfloat16"}, {"communication_data_type": "bf16"}),
        ({"learner.zero": 3, "learner.ranks": 4, "learner.hpz_ranks": 2}, {"zero_optimization": HPZ}),
        ({"learner.zero": 2, "learner.ranks": 4, "learner.hpz_ranks": 2}, {"zero_optimization": HPZ_UNUSED}),
    ],
)
def test_settings_reach_deepspeed_and_adam(values: dict[str, Any], arrives: dict[str, Any]):
    def boundary(config: RunConfig) -> dict[str, Any]:
        learner, adam = config.learner, config.optimizer
        return deepspeed_config(learner, adam) | optimizer_arguments(learner, adam)

    changed = changed_by(values, boundary)
    assert arrives.items() <= changed.items()


def test_determinism_and_threads_reach_the_processes(model: Path):
    deterministic = {"deterministic": True}
    assert changed_by(deterministic, engine_environment) == {"VLLM_BATCH_INVARIANT": "1"}
    assert changed_by(deterministic, rank_environment).keys() == {
        "CUBLAS_WORKSPACE_CONFIG",
        "FLASH_ATTENTION_DETERMINISTIC",
    }
    assert changed_by({"learner.num_threads": 3}, rank_environment) == {"OMP_NUM_THREADS": "3"}


def test_settings_reach_programs_in_the_sandbox():
    limits = program_limits(SandboxConfig(time_limit_s=2.0, memory_mb=128, max_output_mb=3, max_output_chars=99))
    assert (limits.cpu_s, limits.wall_s) == (2.0, 4.0)  # by the clock half as much again, and a second
    assert (limits.memory_bytes, limits.output_bytes) == (128 * 2**20, 3 * 2**20)
    assert limits.stdout_chars == limits.stderr_chars == 99
    assert program_limits(SandboxConfig(wall_limit_s=9.0)).wall_s == 9.0
