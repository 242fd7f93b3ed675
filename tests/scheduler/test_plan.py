"""The planner's arithmetic, against the figures on paper."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.plan import PlanConfig, of_scale, plan, report
from rstar_ray.errors import ConfigError
from scheduler.planner.capacity import (
    QWEN3_14B,
    Gpu,
    Pools,
    engine_memory,
    lacks,
    plan_pools,
    read_model,
    remedies,
)
from scheduler.traces.stage_traces import STAGES
from tests import derived

MI300X_PEAKS = {"bandwidth_tb_s": 5.3, "tflops": 1_307.0}


def colocated(*, gpus: int = 64, memory_gb: float = 192.0, tensor_parallel: int = 1):
    return plan_pools(
        QWEN3_14B, Gpu(memory_gb=memory_gb), shared(gpus, tensor_parallel), stage=STAGES["stage1"], rollouts=16_384
    )


def shared(gpus: int, tensor_parallel: int = 1) -> Pools:
    pools = derived.pools(engine_gpus=gpus, learner_gpus=gpus).with_learner(micro_batch_tokens=20_480)
    return pools.with_engine(tensor_parallel=tensor_parallel)


def with_share(pools: Pools, share: float) -> Pools:
    return replace(pools, takes_rest=False).with_engine(gpu_memory_share=share)


def test_64_large_gpus_hold_engine_and_learner_and_two_thirds_of_a_million_kv_tokens():
    placement = colocated()
    assert placement.memory.trained_state == pytest.approx(14.8 * 18 / 64)
    assert 550_000 < placement.kv_tokens_per_replica < 800_000
    assert placement.memory.total == pytest.approx(192.0)
    assert not placement.problems


def test_an_engine_has_no_more_kv_than_its_share_of_the_gpu_leaves_beside_its_weights():
    pools, gpu, stage = shared(64), Gpu(memory_gb=192.0), STAGES["stage1"]
    whole, half = (engine_memory(QWEN3_14B, gpu, one) for one in (pools, with_share(pools, 0.5)))
    assert half.kv == pytest.approx(0.5 * 192 - 29.6) and half.kv < whole.kv
    assert engine_memory(QWEN3_14B, gpu, with_share(pools, 0.95)).kv == whole.kv
    (problem,) = lacks(QWEN3_14B, gpu, stage, with_share(pools, 0.95))
    assert problem.startswith("an engine's share of 0.95 is 182.4 GB, and beside a learner rank ")
    offered = remedies(QWEN3_14B, gpu, stage, with_share(pools, 0.95))
    assert "--engine.gpu-memory-share 0.2 instead of 0.95" in offered
    assert lacks(QWEN3_14B, gpu, stage, with_share(pools, 0.1))[0].startswith("-10.4 GB are left for KV")
    asked = PlanConfig(gpu_memory_share=0.5, micro_batch_tokens=20_480)
    model, placement, separated = plan(asked)
    assert placement.memory == half and separated is not None and not separated.problems
    assert "  engine's share      0.50 " in report(asked, model, placement, separated)
    with pytest.raises(ConfigError, match=r"--gpu-memory-share: must be in \(0, 0\.95\] \(got 1\.5\)"):
        PlanConfig(gpu_memory_share=1.5)


def test_no_placement_overlaps_the_phases_of_a_step():
    _, placement, separated = plan(of_scale("mi300x-64"))
    assert separated is not None
    for one in (placement, separated):
        assert one.step_s == pytest.approx(one.generate_s + one.learn_s + one.publish_s)


def test_a_scale_of_80_gb_is_planned_with_the_peaks_of_its_own_gpu():
    (_, slower, _), (_, faster, _) = (plan(replace(of_scale("gpu-8"), **peaks)) for peaks in ({}, MI300X_PEAKS))
    assert slower.learn_s == pytest.approx(faster.learn_s * 1_307 / 989)
    assert slower.generate_s > faster.generate_s


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
    with pytest.raises(ConfigError, match=r"--model: .*absent does not exist. Hint: give a model's folder"):
        plan(PlanConfig(model=str(tmp_path / "absent")))
