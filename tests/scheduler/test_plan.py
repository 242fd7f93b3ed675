"""The planner's arithmetic, against the figures on paper."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from actors.weights.buckets import WeightEntry, plan_buckets, size_of
from actors.weights.model_parameters import linear_layers, parameter_shapes
from recipes.plan import PlanConfig, of_scale, plan, report, staleness_line
from rstar_ray.algorithm.state_bytes import rank_bytes
from rstar_ray.config import CheckpointConfig, LearnerConfig
from rstar_ray.errors import ConfigError
from scheduler.planner.capacity import (
    ENGINE_OWN_GB,
    Pools,
    activations_gb,
    adapter_parameters,
    apart,
    engine_memory,
    lacks,
    plan_pools,
    recommended,
    remedies,
    stale_steps,
    trained_gb,
)
from scheduler.planner.checkpoint_cost import plan_checkpoint
from scheduler.planner.gpus import EXPECTED, GPUS, Gpu
from scheduler.planner.model_shape import QWEN3_14B, read_model
from scheduler.planner.step_time import decode_step_s, learning
from scheduler.traces.stage_traces import STAGES, synthetic
from scheduler.traces.trace import TraceRollout
from tests import derived

CONFIG_14B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False, "hidden_size": 5_120,
    "intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip


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
    assert half.kv == pytest.approx(0.5 * 192 - 29.6 - ENGINE_OWN_GB) and half.kv < whole.kv
    assert engine_memory(QWEN3_14B, gpu, with_share(pools, 0.95)).kv == whole.kv
    (problem,) = lacks(QWEN3_14B, gpu, stage, with_share(pools, 0.95))
    assert problem.startswith("an engine's share of 0.95 is 182.4 GB, and beside a learner rank ")
    offered = remedies(QWEN3_14B, gpu, stage, with_share(pools, 0.95))
    assert "--engine.gpu-memory-share 0.7 instead of 0.95" in offered
    assert lacks(QWEN3_14B, gpu, stage, with_share(pools, 0.1))[0].startswith("-13.1 GB are left for KV")
    asked = PlanConfig(gpu_memory_share=0.5, micro_batch_tokens=20_480)
    model, placement, separated = plan(asked)
    assert placement.memory == half and separated is not None and not separated.problems
    assert "  engine's share      0.50 " in report(asked, model, placement, separated)
    with pytest.raises(ConfigError, match=r"--gpu-memory-share: must be in \(0, 0\.95\] \(got 1\.5\)"):
        PlanConfig(gpu_memory_share=1.5)


def test_a_step_is_the_sum_of_its_parts_and_lies_in_its_range():
    _, placement, separated = plan(of_scale("mi300x-64"))
    assert separated is not None
    for one in (placement, separated):
        parts = one.expected.parts
        assert one.step_s == pytest.approx(sum(parts.values())) and min(parts.values()) >= 0
        assert 0.5 * one.step_s < one.least_s < one.step_s < one.most_s < 2 * one.step_s
        assert one.limited_by.startswith(max(parts, key=lambda name: parts[name]))
    assert 0.1 < placement.expected.learning.mfu < 0.5


def test_memory_alone_names_a_gpu_of_that_size():
    named, by_memory = (plan(replace(of_scale("gpu-8"), **gpu))[1] for gpu in ({"gpu": "h100"}, {}))
    assert named == by_memory
    assert PlanConfig(gpu_memory_gb=80.0).planned_gpu() == GPUS["h100"]
    older = plan(replace(of_scale("gpu-8"), gpu="a100"))[1]
    assert older.memory == by_memory.memory and older.step_s > 1.5 * by_memory.step_s
    assert PlanConfig(gpu="h200", gpu_memory_gb=100.0).planned_gpu() == replace(GPUS["h200"], memory_gb=100.0)


def test_a_decode_step_reads_weights_and_contexts_once():
    gpu, bandwidth = GPUS["h100"], 3.35e12 * EXPECTED.decode_bandwidth
    step_s = decode_step_s(QWEN3_14B, gpu, EXPECTED, 1, 64, 64 * 2_000)
    read = 2 * 14.8e9 + 64 * 2_000 * 40 * 8 * 128 * 2 * 2
    assert step_s == pytest.approx(read / bandwidth + EXPECTED.launch_s)


def of_update(**changes: object):
    sample, pools = _lengths(), shared(64).with_learner(**{"zero": 3, "micro_batch_tokens": 32_768, **changes})
    return learning(
        QWEN3_14B, Gpu(), EXPECTED, pools.learner, sample, ranks=64, rows=8_192, trained_parameters=14.8e9, passes=4
    )


def _lengths() -> list[TraceRollout]:
    return synthetic(STAGES["stage1"], groups=4, siblings=8, seed=0)


def test_an_update_computes_its_flops_and_gathers_weights_in_each_micro_batch():
    usual = of_update()
    tokens = 8_192 / 64 * sum(one.prompt_tokens + one.response_tokens for one in _lengths()) / len(_lengths())
    least_s = 8 * QWEN3_14B.matmul_parameters * tokens / (1_307e12 * Gpu().matmul_share)
    assert least_s < usual.compute_s < 1.6 * least_s
    assert usual.mfu == pytest.approx(6 * 14.8e9 * tokens / (1_307e12 * usual.total_s))
    network_gb_s = 50 * EXPECTED.links
    micro_batches = -(-tokens // 32_768)
    traffic_s = 63 / 64 * micro_batches * (3 * 29.6 + 59.2) / network_gb_s
    assert usual.exposed_s == pytest.approx((1 - EXPECTED.hidden) * traffic_s)


@pytest.mark.parametrize(
    "changes", [{"hpz_ranks": 8, "ranks": 64}, {"reduce_dtype": "bfloat16"}, {"micro_batch_tokens": 65_536}]
)
def test_settings_that_send_less_are_counted(changes: dict[str, object]):
    assert of_update(**changes).exposed_s < 0.8 * of_update().exposed_s


def test_fused_element_wise_kernels_are_counted():
    assert of_update(liger=True).compute_s < of_update().compute_s


def test_hpz_holds_one_more_copy_of_the_weights_on_a_node():
    usual, copied = (shared(64).with_learner(ranks=64, hpz_ranks=ranks) for ranks in (1, 8))
    assert trained_gb(QWEN3_14B, copied) - trained_gb(QWEN3_14B, usual) == pytest.approx(29.6 / 8)


def test_engines_that_sleep_have_the_room_of_an_update():
    """14B on eight GPUs of 80 GB, as the scale has it and without sleep mode."""
    asleep = of_scale("gpu-8")
    beside = replace(asleep, sleep=False, gpu_memory_share=0.45, max_context_tokens=16_384)
    (model, one, _), (_, other, _) = plan(asleep), plan(beside)
    assert not one.problems and not other.problems
    assert one.memory.kv == pytest.approx(0.8 * 80 - 29.6 - ENGINE_OWN_GB)
    assert one.kv_tokens_per_replica > 5 * other.kv_tokens_per_replica and one.step_s < 0.6 * other.step_s
    assert one.memory.total <= 80 < one.memory.total + activations_gb(model, asleep.micro_batch_tokens)


def test_an_engine_without_room_for_its_longest_context_does_not_fit():
    """vLLM does not start with less."""
    config = replace(of_scale("gpu-8"), sleep=False, gpu_memory_share=0.45)
    _, placement, _ = plan(config)
    (problem,) = placement.problems
    assert "one rollout may need 32768" in problem
    assert "--engine.sleep with --engine.gpu-memory-share 0.8" in problem


@pytest.mark.long
def test_14b_without_its_weights_has_the_sizes_that_the_planner_counts(tmp_path: Path):
    """transformers' model on torch's meta device: parameters, ZeRO-3's partitions, buckets of a publish, adapters."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG_14B))
    planned, shapes, ranks = read_model(path), parameter_shapes(tmp_path), 64
    sizes = [math.prod(shape) for shape in shapes.values()]
    assert planned.parameters == pytest.approx(sum(sizes), rel=1e-3)
    assert QWEN3_14B.parameters == pytest.approx(sum(sizes), rel=5e-3)
    partition = sum(-(-size // ranks) for size in sizes)  # DeepSpeed pads each parameter
    assert rank_bytes(planned.parameters, dtype="bfloat16", zero=3, ranks=ranks).state == pytest.approx(
        18 * partition, rel=1e-3
    )
    learner = LearnerConfig(ranks=ranks)
    entries = [WeightEntry(name, shape, "bfloat16", 0) for name, shape in shapes.items()]
    buckets = plan_buckets(entries, learner.bucket_bytes)
    assert sum(map(size_of, buckets)) == pytest.approx(2 * sum(sizes), rel=1e-3)
    assert planned.weights_gb * 1e9 / learner.bucket_bytes == pytest.approx(len(buckets), rel=0.2)
    checkpoint = plan_checkpoint(planned, learner, CheckpointConfig())
    assert checkpoint.rank_gb == pytest.approx(12 * partition / 1e9, rel=1e-3)
    adapters = sum(32 * sum(sides) for sides in linear_layers(tmp_path).values())
    assert adapter_parameters(planned, 32) == adapters


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


def test_rollouts_of_later_steps_shorten_a_step_of_engines_and_learners_that_take_turns():
    placement = colocated()
    gpu, stage = Gpu(memory_gb=192.0), STAGES["stage1"]
    turns = stale_steps(QWEN3_14B, gpu, shared(64), placement.expected, stage=stage, rollouts=16_384)
    assert turns[0] == placement.step_s and turns[2] <= 1.02 * turns[1] < turns[0]
    assert turns[0] / turns[1] < 1.5 and recommended(turns) > 0
    sleeping = shared(64).with_engine(sleep=True)
    asleep = stale_steps(QWEN3_14B, gpu, sleeping, placement.expected, stage=stage, rollouts=16_384)
    assert asleep == turns  # a staleness excludes sleep
    small = Gpu(memory_gb=60.0)
    assert lacks(QWEN3_14B, small, stage, sleeping.with_engine(sleep=False))
    alone = stale_steps(QWEN3_14B, small, sleeping, placement.expected, stage=stage, rollouts=16_384)
    assert alone == {0: placement.step_s} and recommended(alone) == 0


def test_on_separate_gpus_the_learners_time_is_filled_first():
    gpu, stage, pools = Gpu(memory_gb=192.0), STAGES["stage1"], apart(shared(64), 40, 24)
    expected = plan_pools(QWEN3_14B, gpu, pools, stage=stage, rollouts=16_384).expected
    steps = stale_steps(QWEN3_14B, gpu, pools, expected, stage=stage, rollouts=16_384)
    learner_s = expected.learning.total_s + expected.publish_s
    assert steps[1] == pytest.approx(max(expected.generation.total_s, learner_s) + expected.host_s)
    assert steps[2] <= steps[1] < steps[0]


def test_a_staleness_that_gains_next_to_nothing_is_not_recommended():
    assert recommended({0: 100.0, 1: 98.0, 2: 97.5}) == 0
    assert recommended({0: 100.0, 1: 80.0, 2: 79.0}) == 1


def test_the_reason_for_a_staleness_is_that_of_its_times():
    awake, asleep = colocated(), plan(of_scale("gpu-8"))[1]
    assert asleep.memory.sleeps and not awake.memory.sleeps
    for placement, steps, reason in (
        (awake, {0: 100.0, 1: 80.0, 2: 79.0}, "--staleness 1 is recommended (1.25 x faster)."),
        (awake, {0: 100.0, 1: 98.0, 2: 97.5}, "--staleness 0 is recommended (nearly as fast as a larger one)."),
        (asleep, {0: 611.0, 1: 732.0, 2: 710.0}, "--staleness 0 is recommended (no larger one is faster)."),
        (asleep, {0: 611.0}, "(a larger one needs --engine.no-sleep, which does not fit)."),
    ):
        assert staleness_line(placement, steps).endswith(reason)
