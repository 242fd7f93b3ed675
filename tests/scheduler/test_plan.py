"""The planner's arithmetic, against the figures on paper."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.weights.buckets import WeightEntry, plan_buckets, size_of
from actors.weights.model_parameters import linear_layers, parameter_shapes
from recipes.plan import PlanConfig, by_staleness, checkpoints, main, of_scale, parsed, plan, report, staleness_line
from rstar_ray.algorithm.state_bytes import rank_bytes
from rstar_ray.config import CheckpointConfig, LearnerConfig, RunConfig
from rstar_ray.errors import ConfigError
from scheduler.planner.capacity import (
    ENGINE_OWN_GB,
    Pools,
    activations_gb,
    adapter_parameters,
    apart,
    awake,
    engine_memory,
    kv_tokens_of,
    lacks,
    longest_tokens,
    plan_pools,
    pools_of,
    recommended,
    remedies,
    stale_steps,
    trained_gb,
)
from scheduler.planner.checkpoint_cost import plan_checkpoint
from scheduler.planner.gpus import EXPECTED, GPUS, Gpu
from scheduler.planner.model_shape import QWEN3_14B, ModelShape, read_model
from scheduler.planner.step_time import decode_step_s, engine_cost, learning
from scheduler.traces.stage_traces import STAGES, StageShape, synthetic
from scheduler.traces.trace import TraceRollout, TraceTurn
from tests import derived

CONFIG_14B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False, "hidden_size": 5_120,
    "intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip

LONGEST = longest_tokens(STAGES["stage1"])


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


def test_an_update_has_room_for_a_rollout_longer_than_a_micro_batch():
    """A rollout is not split over micro batches."""
    gpu, tokens = Gpu(memory_gb=192.0), (4_096, LONGEST, LONGEST + 4_096)
    one, two, three = (
        engine_memory(QWEN3_14B, gpu, shared(64).with_learner(micro_batch_tokens=each), LONGEST) for each in tokens
    )
    assert one.activations == two.activations < three.activations


def test_an_engine_has_no_more_kv_than_its_share_of_the_gpu_leaves_beside_its_weights():
    pools, gpu, stage = shared(64), Gpu(memory_gb=192.0), STAGES["stage1"]
    whole, half = (engine_memory(QWEN3_14B, gpu, one, LONGEST) for one in (pools, with_share(pools, 0.5)))
    assert half.kv == pytest.approx(0.5 * 192 - 29.6 - ENGINE_OWN_GB) and half.kv < whole.kv
    assert engine_memory(QWEN3_14B, gpu, with_share(pools, 0.95), LONGEST).kv == whole.kv
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


def test_the_printed_share_fits_when_it_is_given_and_the_next_larger_one_does_not():
    asked = PlanConfig(gpus=32, gpu_memory_gb=141.0, micro_batch_tokens=8_192)
    model, placement, separated = plan(asked)
    assert not placement.problems
    (line,) = (line for line in report(asked, model, placement, separated).splitlines() if "engine's share " in line)
    share = float(line.split()[2])
    pools = pools_of(asked.run(), engine_gpus=32, learner_gpus=32, colocated=True)
    given, larger = (
        lacks(model, asked.planned_gpu(), asked.shape(), with_share(pools, share + more)) for more in (0.0, 0.01)
    )
    assert not given and larger


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


QWEN25_7B = ModelShape(
    name="Qwen2.5-7B", parameters=7.6e9, layers=28, hidden=3_584, intermediate=18_944, heads=28, kv_heads=4,
    head_dim=128, vocabulary=152_064,
)  # fmt: skip


def test_more_gpus_than_kv_heads_hold_copies_of_the_heads():
    gpu, many = Gpu(), replace(QWEN25_7B, heads=32)  # can be split over 8
    four, eight = (engine_memory(many, gpu, shared(8, parallel), LONGEST).kv for parallel in (4, 8))
    tokens = [kv_tokens_of(many, gpu, shared(8, parallel), LONGEST) for parallel in (4, 8)]
    assert tokens[1] / tokens[0] == pytest.approx(eight / four, rel=1e-4)  # not twice as many
    costs = [engine_cost(many, gpu, EXPECTED, parallel).per_context_s for parallel in (2, 4, 8)]
    assert costs[0] == 2 * costs[1] and costs[2] == costs[1]
    read = [decode_step_s(many, gpu, EXPECTED, parallel, 1, 1e6) for parallel in (4, 8)]
    assert read[0] - read[1] == pytest.approx(many.weights_gb / 8 / (gpu.bandwidth_tb_s * 1e3 * 0.6))


def test_only_splits_that_vllm_accepts_are_planned():
    assert [size for size in range(1, 9) if QWEN25_7B.splits(size)] == [1, 2, 4]
    assert [size for size in range(1, 13) if replace(QWEN25_7B, heads=48).splits(size)] == [1, 2, 4, 8, 12]
    gpu, stage = Gpu(memory_gb=32.0), STAGES["stage1"]
    pools = apart(shared(64).with_learner(offload=True, micro_batch_tokens=2_048), 8, 56)
    odd, even = (remedies(replace(QWEN25_7B, heads=heads, parameters=65e9), gpu, stage, pools) for heads in (28, 32))
    eight = "--engine.tensor-parallel 8 instead of 1"
    assert eight in even and odd and not any(eight in change for change in odd)
    problem = r"--tensor-parallel: vLLM cannot split the 40 attention heads and 8 KV heads of Qwen3-14B over 5 GPUs"
    with pytest.raises(ConfigError, match=problem + r"\. Hint: give one of 1, 2, 4"):
        plan(PlanConfig(gpus=20, tensor_parallel=5))


def test_an_engine_over_several_gpus_shares_none():
    model, shares, apart_from_it = plan(PlanConfig(gpus=16, tensor_parallel=2))
    (problem,) = shares.problems
    assert problem.startswith("an engine over 2 GPUs needs them whole") and problem.endswith("separated pools")
    assert apart_from_it is not None and not apart_from_it.problems
    large = replace(model, parameters=72e9)
    for change in remedies(large, Gpu(memory_gb=141.0), STAGES["stage1"], shared(64)):
        assert "tensor-parallel" not in change or "separated" in change


def test_options_are_suggested_before_other_gpus_also_where_it_takes_three():
    large = {"parameters": 72.7e9, "layers": 80, "hidden": 8_192, "intermediate": 29_568, "heads": 64, "kv_heads": 8}
    model, asked = replace(QWEN25_7B, **large), PlanConfig(gpus=64, gpu_memory_gb=80.0)
    changes = remedies(model, asked.planned_gpu(), asked.shape(), shared(64))
    assert changes and not any("GPUs" in change for change in changes)


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


def test_a_rollout_of_the_whole_cache_does_not_fit():
    """vLLM reserves a block."""
    gpu, pools = Gpu(memory_gb=192.0), shared(64).with_engine(kv_tokens=20_480, max_context_tokens=16_384)
    fits = replace(STAGES["stage1"], max_response_tokens=20_480 - 2_048)
    longer = replace(fits, max_response_tokens=fits.max_response_tokens + 1)
    assert not lacks(QWEN3_14B, gpu, fits, pools)
    (problem,) = lacks(QWEN3_14B, gpu, longer, pools)
    assert "20512 tokens; one rollout may need 20481, and vLLM reserves one block (32 tokens)" in problem


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


@pytest.mark.parametrize(("family", "tied"), [("gemma3_text", True), ("smollm3", True), ("qwen3", False)])
def test_a_model_type_s_default_decides_where_tied_embeddings_are_not_named(tmp_path: Path, family: str, tied: bool):
    path, sizes = tmp_path / "config.json", {**CONFIG_14B, "model_type": family}
    path.write_text(json.dumps(sizes | {"tie_word_embeddings": tied}))
    named = read_model(path).parameters
    path.write_text(json.dumps({name: size for name, size in sizes.items() if name != "tie_word_embeddings"}))
    assert read_model(path).parameters == named


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


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ("--gpus 0", 2, "error: --gpus: must be above 0 and finite (got 0). Hint: "),
        ("--scale tiny", 2, "error: --scale: tiny has no GPUs to plan for. Hint: "),
        ("--dry-run", 2, "error: --dry-run: needs a scale, whose actors it places. Hint: "),
        ("--model {config}", 2, "error: --model: {config}: no JSON object. Hint: "),
        ("--gpus 1 --gpu-memory-gb 24", 1, ""),
    ],
)
def test_a_refused_option_and_a_model_that_does_not_fit_have_different_exit_statuses(
    options: str, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text("[]")
    known = {"config": tmp_path / "config.json"}
    assert main(options.format(**known).split()) == status
    shown = capsys.readouterr()
    assert shown.err.startswith(said.format(**known)) and bool(shown.err) == (status == 2)
    assert ("DOES NOT FIT" in shown.out) == (status == 1)


def test_rollouts_of_later_steps_shorten_a_step_of_engines_and_learners_that_take_turns():
    placement = colocated()
    gpu, stage = Gpu(memory_gb=192.0), STAGES["stage1"]
    turns = stale_steps(QWEN3_14B, gpu, shared(64), placement.expected, stage=stage, rollouts=16_384)
    assert turns[0] == placement.step_s and turns[2] <= 1.02 * turns[1] < turns[0]
    assert turns[0] / turns[1] < 1.5 and recommended(turns) > 0
    sleeping = shared(64).with_engine(sleep=True)
    asleep = stale_steps(QWEN3_14B, gpu, sleeping, placement.expected, stage=stage, rollouts=16_384)
    beside = awake(QWEN3_14B, gpu, sleeping, LONGEST)  # a staleness excludes sleep
    assert asleep == stale_steps(QWEN3_14B, gpu, beside, placement.expected, stage=stage, rollouts=16_384)
    small = Gpu(memory_gb=60.0)
    assert lacks(QWEN3_14B, small, stage, sleeping.with_engine(sleep=False))
    alone = stale_steps(QWEN3_14B, small, sleeping, placement.expected, stage=stage, rollouts=16_384)
    assert alone == {0: placement.step_s} and recommended(alone) == 0


def test_engines_that_no_longer_sleep_have_the_share_of_memory_that_is_recommended():
    asleep = of_scale("gpu-8")
    model, placement, _ = plan(asleep)
    steps = by_staleness(asleep, model, placement)
    share = placement.awake_share
    assert f"--staleness 1 --engine.no-sleep --engine.gpu-memory-share {share:g} {steps[1]:.0f} s" in staleness_line(
        placement, steps
    )
    beside = replace(asleep, sleep=False, gpu_memory_share=share)
    _, other, _ = plan(beside)
    assert not other.problems and by_staleness(beside, model, other)[1] == steps[1]
    assert plan(replace(beside, gpu_memory_share=share + 0.01))[1].problems
    smaller = replace(asleep, gpu_memory_share=0.5)
    assert plan(smaller)[1].awake_share == 0.5


def test_on_separate_gpus_a_draw_begins_when_the_step_a_staleness_before_has_ended():
    """Rollouts that hardly slow each other: each draw takes as long as alone, so that a step with its draw takes a
    synchronous step's time, and one step ends in each part of it."""
    alike = StageShape(
        max_response_tokens=2_000, max_turns=1, mean_response_tokens=2_000,
        recorded=(TraceRollout("a", 100, (TraceTurn(2_000),)),) * 8,
    )  # fmt: skip
    gpu, pools = Gpu(memory_gb=192.0), apart(shared(8), 4, 4)
    expected = plan_pools(QWEN3_14B, gpu, pools, stage=alike, rollouts=8).expected
    update_s = expected.total_s - expected.generation.total_s
    assert update_s < expected.generation.total_s / 2
    steps = stale_steps(QWEN3_14B, gpu, pools, expected, stage=alike, rollouts=8)
    assert steps[1] == pytest.approx(steps[0] / 2, rel=0.02) and steps[2] == pytest.approx(steps[0] / 3, rel=0.04)


def test_a_step_with_one_rollout_per_replica_takes_as_long_as_its_longest():
    uneven = StageShape(
        max_response_tokens=2_000, max_turns=1, mean_response_tokens=1_005,
        recorded=(TraceRollout("a", 100, (TraceTurn(10),)), TraceRollout("b", 100, (TraceTurn(2_000),))),
    )  # fmt: skip
    gpu, pools = Gpu(memory_gb=192.0), apart(shared(8), 4, 4)
    one, two = (
        plan_pools(QWEN3_14B, gpu, pools, stage=uneven, rollouts=4 * each).expected.generation.total_s
        for each in (1, 2)
    )
    assert one == pytest.approx(two, rel=0.1)


def test_on_separate_gpus_no_step_is_shorter_than_the_learners_part():
    gpu, stage, pools = Gpu(memory_gb=192.0), STAGES["stage1"], apart(shared(64), 56, 8)
    expected = plan_pools(QWEN3_14B, gpu, pools, stage=stage, rollouts=16_384).expected
    steps = stale_steps(QWEN3_14B, gpu, pools, expected, stage=stage, rollouts=16_384)
    assert steps[2] == pytest.approx(steps[1])
    assert steps[1] == pytest.approx(expected.learning.total_s + expected.publish_s + expected.host_s)


def test_a_staleness_that_gains_next_to_nothing_is_not_recommended():
    assert recommended({0: 100.0, 1: 98.0, 2: 97.5}) == 0
    assert recommended({0: 100.0, 1: 80.0, 2: 79.0}) == 1


def test_placements_are_compared_with_the_staleness_recommended_for_each():
    asked = PlanConfig(micro_batch_tokens=20_480)
    model, *placements = plan(asked)
    best = dict[str, float]()
    for placement in placements:
        assert placement is not None and not placement.problems
        steps = by_staleness(asked, model, placement)
        best[f"{placement.name} with --staleness {recommended(steps)}"] = steps[recommended(steps)]
        assert not placement.memory.sleeps or not recommended(steps)  # else further options are named
    better, other = sorted(best, key=lambda name: best[name])
    last = report(asked, model, *placements).splitlines()[-1]
    assert last == f"{better} is {best[other] / best[better]:.2f} x faster per step than {other}."


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


SMALL_CONFIG = CONFIG_14B | {
    "hidden_size": 1_024, "intermediate_size": 3_072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "tie_word_embeddings": True,
}  # fmt: skip


def no_checks(_: RunConfig) -> tuple[()]:
    return ()


@pytest.fixture
def of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parse a plan of a run whose settings file has this text too."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL_CONFIG))
    monkeypatch.setattr("recipes.plan.check_files", no_checks)  # the run lacks problems

    def write(text: str, *options: str) -> PlanConfig:
        path = tmp_path / f"run-{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(f'scale = "gpu"\nmodel = "{tmp_path / "model"}"\nprompts_per_step = 8\n{text}')
        return parsed(["--run-config", str(path), *options])

    return write


@pytest.mark.parametrize(
    "text",
    [
        "[algorithm]\nkeep = 8",
        '[algorithm]\nresample = "none"',
        "[optimizer]\nupdates_per_step = 2",
        "[learner]\nactivation_checkpointing = false",
        "[learner]\nlogprob_chunk_tokens = 1024",
        "[learner]\nbucket_mb = 64",
        '[learner]\nweights_by = "object_store"',
        "[engine]\nkv_tokens = 65536",
        "[rollout]\nmax_response_tokens = 4096",
        "[engine]\nreplicas = 2\n[learner]\nranks = 2",
    ],
)
def test_a_plan_of_a_run_depends_on_its_settings(of_file: Callable[..., PlanConfig], text: str):
    assert plan(of_file(text))[1] != plan(of_file(""))[1]


def test_a_plan_of_a_run_has_the_runs_model_and_placement(of_file: Callable[..., PlanConfig]):
    config = of_file("[engine]\nblock_size = 16\nreplicas = 4\n[learner]\nranks = 4\n[checkpoint]\nkeep = 5\n")
    model, placement, separated = plan(config)
    assert (model.name, model.hidden, config.gpus) == ("model", 1_024, 4)
    assert placement.kv_tokens_per_replica % 16 == 0 and separated is not None
    assert checkpoints(config, model, 4).keep == 5
    own = "gpus_per_replica = 2\ntensor_parallel = 2\nreplicas = 2\n[learner]\nranks = 3\ngpus_per_rank = 1\nown_gpus"
    assert of_file(f"[engine]\n{own} = true").gpus == 6


def test_options_win_over_the_settings_of_a_run(of_file: Callable[..., PlanConfig]):
    long = "[engine]\nmax_context_tokens = 65536\n[rollout]\nmax_response_tokens = 40960\n"
    config = of_file(long, "--gpus", "16", "--prompts", "4", "--micro-batch-tokens", "4096")
    run = config.run()
    assert (config.gpus, run.prompts_per_step, run.learner.micro_batch_tokens) == (16, 4, 4_096)
    assert (run.engine.max_context_tokens, config.shape().max_response_tokens) == (65_536, 40_960)
    assert of_file(long, "--stage", "stage2").shape() == STAGES["stage2"]
    with pytest.raises(ConfigError, match="--scale: has no effect with --run-config"):
        of_file("", "--scale", "gpu-8")
    with pytest.raises(ConfigError, match=r"--learner\.dtype: only bfloat16 is planned"):
        of_file('[learner]\ndtype = "float32"')
