"""The planner's arithmetic, against the figures on paper."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.plan import PlanConfig, plan, report, row
from rstar_ray.algorithm.state_bytes import state_bytes
from rstar_ray.config import RunConfig, leaves, with_values
from rstar_ray.errors import ConfigError
from scheduler.plan import (
    QWEN3_14B,
    Gpu,
    Pools,
    activations_gb,
    best_separated,
    engine_memory,
    lacks,
    plan_pools,
    pools_of,
    read_model,
    remedies,
    trained_gb,
)
from scheduler.traces.stages import STAGES
from tests import derived


def colocated(*, gpus: int = 64, memory_gb: float = 192.0, tensor_parallel: int = 1):
    return plan_pools(
        QWEN3_14B, Gpu(memory_gb=memory_gb), shared(gpus, tensor_parallel), stage=STAGES["stage1"], rollouts=16_384
    )


def shared(gpus: int, tensor_parallel: int = 1) -> Pools:
    return derived.pools(
        engine_gpus=gpus, learner_gpus=gpus, tensor_parallel=tensor_parallel, micro_batch_tokens=20_480
    )


def test_the_papers_model_keeps_160_kib_of_kv_per_token():
    assert QWEN3_14B.kv_bytes_per_token == 160 * 1024
    assert QWEN3_14B.weights_gb == pytest.approx(29.6)


def test_64_large_gpus_hold_engine_and_learner_and_two_thirds_of_a_million_kv_tokens():
    placement = colocated()
    assert placement.memory.trained_state == pytest.approx(14.8 * 18 / 64)
    assert 550_000 < placement.kv_tokens_per_replica < 800_000
    assert placement.memory.total == pytest.approx(192.0)
    assert not placement.problems


def test_what_does_not_fit_says_what_to_change():
    placement = colocated(gpus=2, memory_gb=80.0)
    kv, learner = placement.problems
    assert "0 tokens; one rollout may need 10240: 32 GPUs, or GPUs of 256 GB" in kv
    assert learner.startswith("a learner rank needs 161.7 GB")
    assert not colocated(gpus=32, memory_gb=80.0).problems
    assert not colocated(gpus=2, memory_gb=256.0).problems


@pytest.mark.parametrize(
    ("gpus", "memory_gb", "tensor_parallel", "offered", "useless"),
    [
        (1, 192.0, 1, {"4 GPUs"}, "--engine.tensor-parallel separated --learner.micro-batch-tokens"),
        (
            8,
            80.0,
            1,
            {"--engine.tensor-parallel 4 instead of 1", "--learner.offload (optimizer state in host memory)"},
            "",
        ),
        (1, 24.0, 1, set[str](), "separated"),
    ],
)
def test_only_what_helps_is_offered(gpus: int, memory_gb: float, tensor_parallel: int, offered: set[str], useless: str):
    pools = shared(gpus, tensor_parallel)
    gpu, stage = Gpu(memory_gb=memory_gb), STAGES["stage1"]
    assert lacks(QWEN3_14B, gpu, stage, pools)
    found = remedies(QWEN3_14B, gpu, stage, pools)
    assert offered <= set(found)
    assert not any(found_one.startswith(word) for word in useless.split() for found_one in found)


def test_what_is_offered_are_options_of_a_run():
    options = {"--" + name.replace("_", "-") for name in leaves(RunConfig())}
    for gpus, memory_gb in ((1, 24.0), (2, 80.0), (8, 80.0), (16, 80.0), (1, 192.0)):
        for problem in colocated(gpus=gpus, memory_gb=memory_gb).problems:
            assert {word for word in problem.split() if word.startswith("--")} <= options


def test_the_planner_budgets_what_a_run_that_sets_nothing_would_take():
    bf16 = state_bytes("bfloat16", 3)
    assert (bf16.weight, bf16.gradient, bf16.master, bf16.moments, bf16.total) == (2, 4, 4, 8, 18)
    fp32 = state_bytes("float32", 3)
    assert (fp32.total, fp32.offloaded) == (20, 16)
    assert state_bytes("float32", zero=0).total == 16
    pools = derived.pools(micro_batch_tokens=4_096)
    assert trained_gb(QWEN3_14B, pools) == pytest.approx(14.8 * 18)
    assert trained_gb(QWEN3_14B, replace(pools, offload=True)) == pytest.approx(14.8 * 2)
    logits_gb = 3 * RunConfig().learner.logprob_chunk_tokens * QWEN3_14B.vocabulary * 4 / 1e9
    assert activations_gb(
        replace(QWEN3_14B, parameters=0.0, layers=1, hidden=0, intermediate=0), 4_096
    ) == pytest.approx(logits_gb)
    asked, run = PlanConfig(), RunConfig()
    assert (asked.micro_batch_tokens, asked.prompts, asked.tensor_parallel, asked.offload) == (
        run.learner.micro_batch_tokens, run.prompts_per_step, run.engine.tensor_parallel, run.learner.offload
    )  # fmt: skip


def test_offloading_leaves_more_for_kv():
    _, held, _ = plan(PlanConfig(gpus=8))
    _, freed, _ = plan(PlanConfig(gpus=8, offload=True))
    assert held.memory.trained_state == pytest.approx(9 * freed.memory.trained_state)
    assert freed.kv_tokens_per_replica > held.kv_tokens_per_replica
    assert freed.kv_tokens_per_replica % RunConfig().engine.block_size == 0


def test_an_engine_has_no_more_kv_than_its_share_of_the_gpu_leaves_beside_its_weights():
    pools, gpu, stage = shared(64), Gpu(memory_gb=192.0), STAGES["stage1"]
    whole, half = (engine_memory(QWEN3_14B, gpu, replace(pools, memory_share=share)) for share in (0.0, 0.5))
    assert half.kv == pytest.approx(0.5 * 192 - 29.6) and half.kv < whole.kv
    assert engine_memory(QWEN3_14B, gpu, replace(pools, memory_share=0.95)).kv == whole.kv
    (problem,) = lacks(QWEN3_14B, gpu, stage, replace(pools, memory_share=0.95))
    assert problem.startswith("an engine's share of 0.95 is 182.4 GB, and beside a learner rank ")
    offered = remedies(QWEN3_14B, gpu, stage, replace(pools, memory_share=0.95))
    assert "--engine.gpu-memory-share 0.2 instead of 0.95" in offered
    assert lacks(QWEN3_14B, gpu, stage, replace(pools, memory_share=0.1))[0].startswith("-10.4 GB are left for KV")
    asked = PlanConfig(gpu_memory_share=0.5, micro_batch_tokens=20_480)
    model, placement, separated = plan(asked)
    assert placement.memory == half and separated is not None and not separated.problems
    assert "  engine's share      0.50 " in report(asked, model, placement, separated)
    with pytest.raises(ValueError, match=r"--gpu-memory-share is 1\.5, no share"):
        PlanConfig(gpu_memory_share=1.5)


def test_a_run_is_planned_as_it_is_set():
    run = with_values(RunConfig(), {"engine.gpu_memory_share": 0.3, "engine.max_running": 7, "learner.offload": True})
    made = pools_of(run, STAGES["stage1"], engine_gpus=4, learner_gpus=2, colocated=False)
    assert (made.memory_share, made.max_running, made.offload, made.zero) == (0.3, 7, True, run.learner.zero)
    few, many = (replace(shared(8), max_running=seats) for seats in (2, 256))
    steps = [plan_pools(QWEN3_14B, Gpu(), one, stage=STAGES["stage1"], rollouts=4_096) for one in (few, many)]
    assert steps[0].generate_s > steps[1].generate_s


def test_what_does_not_fit_has_no_times():
    config = PlanConfig(gpus=1, gpu_memory_gb=80.0)
    model, placement, separated = plan(config)
    assert placement.problems and separated is None
    lines = report(config, model, placement, separated).splitlines()
    assert any(line.startswith("colocated ") and line.endswith("does not fit") for line in lines)
    assert not any(line.startswith("colocated ") and line.endswith("s") and "adds" not in line for line in lines)
    assert row(placement)["step_s"] is None


@pytest.mark.parametrize("wrong", [{"tflops": 0.0}, {"bandwidth_tb_s": -1.0}, {"gpu_memory_gb": float("nan")},
                                   {"gpu_memory_gb": float("inf")}, {"gpus": 0}])  # fmt: skip
def test_an_option_without_a_meaning_is_named(wrong: dict[str, float]):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is .*, not a number above 0"):
        PlanConfig(**wrong)  # pyright: ignore[reportArgumentType]


def test_engines_of_separated_pools_are_whole():
    best = best_separated(QWEN3_14B, Gpu(), shared(12, 2), stage=STAGES["stage1"], rollouts=3_072)
    assert best is not None and best.engine_gpus % 2 == 0


def test_more_gpus_shorten_both_phases():
    few, many = colocated(gpus=32), colocated(gpus=64)
    assert many.learn_s == pytest.approx(few.learn_s / 2)
    assert many.generate_s < few.generate_s


def test_pools_are_split_where_the_slower_phase_is_shortest():
    best = best_separated(QWEN3_14B, Gpu(), shared(16), stage=STAGES["stage1"], rollouts=4_096)
    assert best is not None and not best.problems
    assert best.engine_gpus + best.learner_gpus == 16
    assert best.step_s == pytest.approx(max(best.generate_s, best.learn_s) + best.publish_s)


def test_a_model_is_read_from_its_config(tmp_path: Path):
    path = tmp_path / "config.json"
    row = {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 17408, "vocab_size": 151936, "tie_word_embeddings": False,
    }  # fmt: skip
    path.write_text(json.dumps(row))
    assert read_model(path).parameters == pytest.approx(14.8e9, rel=0.01)
    path.write_text(json.dumps({**row, "hidden_size": None}))
    with pytest.raises(ValueError, match="'hidden_size' is None"):
        read_model(path)
    path.write_text(json.dumps({**row, "head_dim": None}))
    assert read_model(path).head_dim == 128
    path.write_text(json.dumps({**row, "num_key_value_heads": None}))
    assert read_model(path).kv_heads == 40


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[]", "no JSON object"),
        (b"{", "no JSON"),
        (b'{"a": "\xff"}', "no JSON"),
        (b'{"hidden_size": true}', "'hidden_size' is True"),
        (b'{"num_experts": 128}', "num_experts is 128, a mixture of experts"),
        (b'{"num_local_experts": 8}', "num_local_experts is 8, a mixture of experts"),
    ],
)
def test_a_config_that_cannot_be_planned_is_named(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json: {problem}"):
        read_model(path)


def test_a_plan_is_made_for_the_model_in_a_folder_or_says_that_there_is_none(tmp_path: Path):
    config = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    config |= {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True}
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for named in (folder, folder / "config.json"):
        model, *_ = plan(PlanConfig(gpus=1, gpu_memory_gb=24.0, model=str(named)))
        assert (model.name, round(model.parameters / 1e8)) == ("Qwen3-0.6B", 6)
    with pytest.raises(ConfigError, match=r"--model: .*absent does not exist; give a model's folder"):
        plan(PlanConfig(model=str(tmp_path / "absent")))
