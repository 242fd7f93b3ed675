"""The rehearsal: its comparison on made-up runs, and once in all on real actors."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.rehearse import REHEARSAL, rehearse
from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.scales import MACHINES, at_scale
from rstar_ray.errors import ConfigError
from rstar_ray.tiny.tiny_model import make_random_model
from scheduler.planner.capacity import adapter_parameters
from scheduler.planner.model_shape import QWEN3_14B, ModelShape
from scheduler.planner.rehearsal import Seen, compared

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = ModelShape(
    name="small", parameters=1e6, layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16,
    vocabulary=500,
)  # fmt: skip


def config(scale: str = "tiny") -> RunConfig:
    return at_scale(REHEARSAL.paper, scale, REHEARSAL.tiny)


def row(**changes: Any) -> dict[str, Any]:
    publish = {"gather_s": 1.0, "move_s": 0.5, "load_s": 0.2, "num_bytes": 4_001_000}
    times = {"generate_s": 3.0, "tools_s": 1.0, "verify_s": 0.5, "learn_s": 2.0, "publish_s": 1.7, "step_s": 9.0}
    parts = {f"publish/{name}": value for name, value in publish.items()}
    return {"loss": 0.0, **parts, "memory_bytes/driver": 2e9, "memory_bytes/learner": 3e9, **times} | changes


GOOD = Seen(
    steps=(row(), row(), row()), evaluations=1, learner_bytes=12_000_500, model_bytes=4_000_900, worker_back_s=11.0
)


def wrong(seen: Seen, of: RunConfig | None = None, model: ModelShape = SMALL) -> set[str]:
    of = of or config()
    return {line.what for line in compared(of, model, MACHINES[of.scale].gpu_memory_gb, seen) if line.wrong}


def test_on_gpus_memory_and_times_are_held_against_the_plan():
    run, of_model = config("mi300x-64"), QWEN3_14B.parameters
    changes = {"memory_bytes/learner_device": 40e9, "publish/num_bytes": 2 * of_model}
    rows = tuple(row(**changes) for _ in range(3))
    seen = replace(GOOD, steps=rows, model_bytes=int(2 * of_model), learner_bytes=int(12 * of_model), evaluations=0)
    assert wrong(seen, run, QWEN3_14B) == set()
    lines = {line.what: line for line in compared(run, QWEN3_14B, 192.0, seen)}
    assert lines["a rank, device"].planned == pytest.approx(42.3, abs=0.5)
    assert lines["generate"].planned and "calibrate" in lines["generate"].remark  # 4.5 s are not of such a step
    hot = tuple(one | {"memory_bytes/learner_device": 60e9} for one in rows)
    assert wrong(replace(seen, steps=hot), run, QWEN3_14B) == {"a rank, device"}
    blind = tuple({name: one[name] for name in one if "device" not in name} for one in rows)
    assert wrong(replace(seen, steps=blind), run, QWEN3_14B) == {"a rank, device"}


def test_whole_gpus_for_ranks_and_engines_are_planned_as_separate_ones():
    def planned(**learner: object) -> float | None:
        of = with_values(
            config("gpu-8"),
            {"engine.replicas": 4, "learner.ranks": 4, "engine.gpus_per_replica": 1, "learner.gpus_per_rank": 1}
            | {f"learner.{name}": value for name, value in learner.items()},
        )
        lines = compared(of, QWEN3_14B, 80.0, replace(GOOD, steps=(row(),)))
        return next(line.planned for line in lines if line.what == "generate")

    assert planned() == planned(own_gpus=True)


@pytest.mark.parametrize(("scale", "model"), [("tiny", SMALL), ("mi300x-64", QWEN3_14B)])
def test_adapters_are_published_and_the_model_is_exported_merged_in_float32(scale: str, model: ModelShape):
    run = with_values(config(scale), {"learner.lora_rank": 16})
    each = 4 if scale == "tiny" else 2
    adapters = adapter_parameters(model, 16)
    rows = tuple(row(**{"publish/num_bytes": each * adapters, "memory_bytes/learner_device": 38e9}) for _ in range(3))
    seen = replace(
        GOOD, steps=rows, model_bytes=int(4 * model.parameters), evaluations=int(scale == "tiny"),
        learner_bytes=int(12 * adapters + each * adapters + 4 * model.parameters),
    )  # fmt: skip
    assert wrong(seen, run, model) == set()
    whole = tuple(one | {"publish/num_bytes": each * model.parameters} for one in rows)
    assert wrong(replace(seen, steps=whole), run, model) == {"weights published"}


def test_what_is_refused_is_refused_before_random_weights_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write(*_: Any) -> Path:
        raise AssertionError("weights were written")

    monkeypatch.setattr("recipes.rehearse.random_model", write)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # that it has GPUs is not asked before it starts
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"num_attention_heads": 8, "max_position_embeddings": 1024}')
    options = ["--model", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match=r"--data\.train: it is empty"):
        rehearse(["--scale", "gpu", *options])
    with pytest.raises(ConfigError, match=r"--engine\.max-context-tokens: 2048 is above the 1024"):
        rehearse(["--scale", "tiny", *options])


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["tiny's own", "1e8"])
def test_a_rehearsal_ends_as_planned(tmp_path: Path, parameters: str):
    command = [sys.executable, "recipes/rehearse.py", "--scale", "tiny", "--run-dir", str(tmp_path / "run")]
    if parameters == "1e8":
        command += ["--model", str(larger(tmp_path / "larger")), "--learner.dtype", "bfloat16"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-2_000:]
    lines = json.loads((tmp_path / "run" / "rehearsal.json").read_text())["lines"]
    assert not [line for line in lines if line["wrong"]]
    assert {"steps", "killed worker back after", "weights published", "step"} <= {line["what"] for line in lines}


def larger(folder: Path) -> Path:
    """The tiny world's tokenizer and a model of 1e8 weights."""
    return make_random_model(
        folder, 0, hidden_size=768, intermediate_size=2_304, num_hidden_layers=14, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
