"""The planner's arithmetic done again with pencil and paper, on a model and a GPU of round numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.algorithm.state_bytes import rank_bytes
from scheduler.plan import (
    Gpu,
    Memory,
    ModelShape,
    Pools,
    activations_gb,
    adapter_parameters,
    best_separated,
    engine_cost,
    engine_memory,
    kv_tokens_of,
    lacks,
    longest_tokens,
    plan_pools,
    publish_seconds,
    read_model,
    remedies,
    score_tokens,
    scores_gb,
    trained_gb,
    way_of,
)
from scheduler.traces.stages import StageShape, synthetic
from scheduler.twin.bound import lower_bound
from scheduler.twin.engine_model import EngineShape
from tests import derived

MODEL = ModelShape(
    name="round", parameters=1e9, layers=10, hidden=1_000, intermediate=3_000, heads=10, kv_heads=5, head_dim=100,
    vocabulary=20_000,
)  # fmt: skip
GPU = Gpu(memory_gb=50.0, bandwidth_tb_s=2.0, tflops=100.0)
BUCKET = 0.4  # 1e8 gradients in float32
STAGE = StageShape(max_response_tokens=2_000, max_turns=5, mean_response_tokens=900)


def pools(**more: Any) -> Pools:
    given = {"engine_gpus": 8, "learner_gpus": 4, "tensor_parallel": 2, "micro_batch_tokens": 5_000}
    return derived.pools(**(given | more))


def test_weights_and_kv_are_two_bytes_a_number():
    assert MODEL.weights_gb == 2.0
    assert MODEL.kv_bytes_per_token == 10 * 5 * 100 * 2 * 2


def test_a_gpu_is_an_mi300x_unless_said_otherwise():
    gpu = Gpu()
    assert (gpu.memory_gb, gpu.bandwidth_tb_s, gpu.tflops) == (192.0, 5.3, 1_307.0)
    assert (gpu.bandwidth_share, gpu.prefill_share, gpu.train_share) == (0.7, 0.4, 0.35)
    assert (gpu.runtime_share, gpu.gather_gb_s, gpu.move_gb_s, gpu.load_gb_s) == (0.08, 1.4, 1.1, 10.0)
    assert (gpu.collective_gb_s, gpu.device_load_gb_s) == (40.0, 100.0)


def test_the_mathematical_path_of_attention_holds_a_score_for_every_head_and_pair_and_is_refused_with_that():
    assert scores_gb(MODEL, pools()) == 0.0
    eager = pools(score_tokens=4_000)
    assert scores_gb(MODEL, eager) == pytest.approx(12 * 10 * 5_000 * 4_000 / 1e9)
    less = engine_memory(MODEL, GPU, pools()).kv - engine_memory(MODEL, GPU, eager).kv
    assert less == pytest.approx(scores_gb(MODEL, eager))
    long = pools(score_tokens=22_048)
    said = "GB of attention's scores (10 heads x 22048 x 22048 tokens x 12 bytes)"
    assert said in lacks(MODEL, GPU, STAGE, long)[-1]
    assert "--learner.attention-kernel fused" in remedies(MODEL, GPU, STAGE, long)
    kernels = ("fused", "aiter", "eager")
    held = {kernel: plan(score_tokens=score_tokens(kernel, STAGE)).memory.activations for kernel in kernels}
    longest = longest_tokens(STAGE)
    assert held["fused"] == held["aiter"]
    assert held["eager"] - held["fused"] == pytest.approx(12 * 10 * max(5_000, longest) * longest / 1e9)


def test_a_rank_beside_every_engine_hands_weights_over_and_moves_nothing():
    assert way_of(pools(tensor_parallel=1)) == "ipc"
    assert publish_seconds(MODEL, Gpu(), "ipc") == {"gather": 2.0 / 40.0, "move": 0.0, "load": 2.0 / 100.0}


def test_activations_are_the_layers_inputs_one_layer_twice_a_chunk_of_logits_and_a_gathered_layer():
    kept = 5_000 * 1_000 * 2 * 10
    layer = 2 * 5_000 * (8 * 1_000 + 3 * 3_000) * 2
    logits = 3 * 4_096 * 20_000 * 4
    gathered = 2 * (1e9 / 10 + 20_000 * 1_000) * 2
    assert activations_gb(MODEL, 5_000) == pytest.approx((kept + layer + logits + gathered) / 1e9)


def test_a_decode_step_reads_the_weights_once_and_prefill_is_bound_by_arithmetic():
    cost = engine_cost(MODEL, GPU, tensor_parallel=2)
    bandwidth, flops = 2e12 * 0.7 * 2, 100e12 * 0.4 * 2
    assert cost.fixed_s == pytest.approx(2e9 / bandwidth + 1e-3)
    assert cost.per_sequence_s == 20e-6
    assert cost.per_context_s == pytest.approx(20_000 / bandwidth)
    assert cost.per_prefill_s == pytest.approx(2e9 / flops)
    assert cost.per_prefill_context_s == pytest.approx(4 * 10 * 1_000 / flops)
    assert cost.per_request_s == 0.0


def test_memory_is_shared_by_engine_and_learner_where_they_live_together():
    assert trained_gb(MODEL, pools()) == 18 / 4
    assert trained_gb(MODEL, pools(offload=True)) == 2 / 4
    together, apart = engine_memory(MODEL, GPU, pools()), engine_memory(MODEL, GPU, pools(colocated=False))
    used = activations_gb(MODEL, 5_000)
    assert (together.engine_weights, together.trained_state, together.runtime) == (1.0, 4.5, 4.0)
    assert together.buckets == BUCKET
    assert together.activations == used and together.kv == pytest.approx(50 - 1 - 4.5 - 4 - BUCKET - used)
    assert (apart.trained_state, apart.buckets, apart.activations, apart.kv) == (0.0, 0.0, 0.0, 45.0)
    assert together.total == pytest.approx(50.0)
    assert Memory(engine_weights=3, trained_state=2, buckets=7, activations=1, runtime=4, kv=-5).total == 17
    tokens = int(together.kv * 2 * 1e9 / 20_000)
    assert kv_tokens_of(MODEL, GPU, pools()) == tokens // 32 * 32
    assert kv_tokens_of(MODEL, Gpu(memory_gb=2.0), pools()) == 0
    assert longest_tokens(STAGE) == 4_048


@pytest.mark.parametrize(
    ("zero", "bytes_each"),
    [(0, 4 + 4 + 8), (1, 4 + (4 + 4 + 8) / 4), (2, 4 + (4 + 4 + 8) / 4), (3, (4 + 4 + 4 + 8) / 4)],
)
def test_zero_spreads_more_with_each_stage(zero: int, bytes_each: float):
    held = rank_bytes(1e9, dtype="float32", zero=zero, ranks=4)
    assert held.state == pytest.approx(1e9 * bytes_each)
    assert held.bucket == (4e8 if zero == 3 else 0)
    small = rank_bytes(1e8, dtype="float32", zero=zero, ranks=4)
    assert (small.bucket, small.gradients) == ((4e8, 0.0) if zero == 1 else (held.bucket, held.gradients / 10))
    bf16 = 2 + (4 + 2) + (4 + 8) / 4  # the backward pass adds up in bfloat16 first
    assert trained_gb(MODEL, pools(zero=1)) == pytest.approx(bf16)


def test_what_is_lacking_is_told_with_its_size():
    assert lacks(MODEL, GPU, STAGE, pools()) == []
    small, used = Gpu(memory_gb=5.5), activations_gb(MODEL, 5_000) + 4.5 + BUCKET
    kv, learner = lacks(MODEL, small, STAGE, pools())
    assert kv.startswith(f"{5.5 - 1 - used - 0.44:.1f} GB are left for KV, 0 tokens; one rollout may need 4048")
    assert learner == f"a learner rank needs {used:.1f} GB and 0.4 GB of runtime"
    exact = (4.5 + BUCKET + activations_gb(MODEL, 5_000)) / 0.92
    assert lacks(MODEL, Gpu(memory_gb=exact + 1e-6), STAGE, pools(colocated=False)) == []
    assert len(lacks(MODEL, Gpu(memory_gb=exact - 1e-6), STAGE, pools(colocated=False))) == 1


LORA = "--learner.lora-rank 32 (adapters in place of the weights)"


def test_adapters_need_little_beside_the_frozen_weights():
    rows = 2 * (1_000 + 1_000) + 2 * (1_000 + 500) + 3 * 4_000  # of hidden 1,000, heads 10 and 5 of 100, inner 3,000
    assert adapter_parameters(MODEL, 32) == 10 * 32 * rows
    adapted = pools(lora_rank=32)
    assert trained_gb(MODEL, adapted) == pytest.approx((10 * 32 * rows * 18 + 1e9 * 2) / 4 / 1e9)


def test_the_least_change_of_each_kind_is_offered():
    offload, apart, larger = "--learner.offload (optimizer state in host memory)", "separated pools", "GPUs of 80 GB"
    assert remedies(MODEL, Gpu(memory_gb=6.5), STAGE, pools()) == [offload, LORA, apart, "16 GPUs", larger]
    found = {memory: remedies(MODEL, Gpu(memory_gb=memory), STAGE, pools(offload=True)) for memory in (3.0, 3.4, 4.4)}
    eight, four = (f"--engine.tensor-parallel {parallel} instead of 2" for parallel in (8, 4))
    quarter, half = (f"--learner.micro-batch-tokens {tokens} instead of 5000" for tokens in (1_250, 2_500))
    assert found == {
        3.0: [apart, larger],
        3.4: [eight, quarter, apart, larger],
        4.4: [four, half, LORA, apart, "16 GPUs", larger],
    }
    alone = pools(engine_gpus=1, learner_gpus=1, tensor_parallel=1)
    assert remedies(MODEL, Gpu(memory_gb=1.0), STAGE, alone) == [larger]
    assert remedies(MODEL, Gpu(memory_gb=80.0), STAGE, alone)[-1] == "GPUs of 96 GB"
    large = ModelShape(
        name="large", parameters=70e9, layers=80, hidden=8_192, intermediate=28_672, heads=64, kv_heads=8, head_dim=128,
        vocabulary=128_000,
    )  # fmt: skip
    pairs = remedies(large, Gpu(memory_gb=80.0), STAGE, pools(tensor_parallel=1, micro_batch_tokens=20_000))
    assert pairs and len(pairs) <= 3 and all(" and " in pair for pair in pairs)


def plan(*, colocated: bool = True, rollouts: int = 1_000, engine_gpus: int = 8, learner_gpus: int = 4, **more: Any):
    made = pools(engine_gpus=engine_gpus, learner_gpus=learner_gpus, colocated=colocated, **more)
    return plan_pools(MODEL, GPU, made, stage=STAGE, rollouts=rollouts)


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("rollouts", [1_000, 60_000])
def test_a_steps_time_is_that_of_its_phases(colocated: bool, rollouts: int):
    made = plan(colocated=colocated, rollouts=rollouts)
    sample = synthetic(STAGE, groups=48, siblings=32, seed=0)
    count = len(sample)
    prompt = sum(one.prompt_tokens for one in sample) / count
    response = sum(one.response_tokens for one in sample) / count
    cost = engine_cost(MODEL, GPU, 2)
    kv_tokens = kv_tokens_of(MODEL, GPU, pools(colocated=colocated))
    bound = lower_bound(sample, replicas=1, cost=cost, shape=EngineShape(kv_tokens=kv_tokens, max_running=256))
    work, area = (seconds * rollouts / count / 4 for seconds in (bound.work_s, bound.kv_area_s))
    steps = cost.fixed_s * max(one.generated_tokens for one in sample)
    assert made.generate_s == pytest.approx(1.2 * max(bound.longest_rollout_s, area, min(work + steps, 2 * area)))
    assert made.tools_s == pytest.approx(sum(turn.tool_seconds for one in sample for turn in one.turns) / count)
    tokens = rollouts / 2 * (prompt + response)
    assert made.learn_s == pytest.approx(8 * 1e9 * tokens / (4 * 100e12 * 0.35))
    stored, sent = 2.0 / 1.4 + 2.0 / 1.1 + 2.0 / 10.0, 2.0 / 40.0 + 2.0 / 40.0 + 2.0 / 100.0
    assert made.publish_s == pytest.approx(stored if colocated else sent)  # two GPUs to an engine: no rank beside each
    assert made.weight_way == ("object_store" if colocated else "nccl")
    phases = made.generate_s + made.learn_s if colocated else max(made.generate_s, made.learn_s)
    assert made.step_s == pytest.approx(phases + made.publish_s)
    assert made.in_flight == min(rollouts, int(4 * kv_tokens / (prompt + response / 2)))
    assert (made.kv_tokens_per_replica, made.problems) == (kv_tokens, ())
    assert made.name == ("colocated" if colocated else "separated")
    assert (made.engine_gpus, made.learner_gpus) == (8, 4)


def test_pools_apart_are_split_in_whole_engines_and_the_shortest_step_is_taken():
    def best(gpus: int):
        return best_separated(MODEL, GPU, pools(engine_gpus=gpus), stage=STAGE, rollouts=4_000)

    splits = [plan(colocated=False, rollouts=4_000, engine_gpus=e, learner_gpus=40 - e) for e in range(2, 40, 2)]
    fitting = [split for split in splits if not split.problems]
    assert best(40) == min(fitting, key=lambda split: split.step_s)
    assert best(2) is None
    wide = best(128)
    assert wide is not None and wide.engine_gpus % 8 == 0 and wide.engine_gpus + wide.learner_gpus == 128


def test_a_config_is_counted_parameter_by_parameter(tmp_path: Path):
    row = {
        "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 100, "vocab_size": 500, "tie_word_embeddings": True, "_name_or_path": "who/what",
    }  # fmt: skip
    path = tmp_path / "folder" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(row))
    model = read_model(path)
    attention = 60 * 60 * 2 + 60 * 20 * 2  # query and output; key and value
    assert model.parameters == 3 * (attention + 3 * 60 * 100) + 500 * 60
    assert (model.name, model.head_dim, model.kv_heads, model.layers) == ("who/what", 10, 2, 3)
    assert (model.hidden, model.intermediate, model.vocabulary) == (60, 100, 500)
    path.write_text(json.dumps(row | {"tie_word_embeddings": False, "_name_or_path": "", "num_hidden_layers": 1}))
    untied = read_model(path)
    assert untied.parameters == attention + 3 * 60 * 100 + 2 * 500 * 60 and untied.name == "folder"
    for wrong in (0, -1, 2.5, True, "8"):
        path.write_text(json.dumps(row | {"vocab_size": wrong}))
        with pytest.raises(ValueError, match=r"'vocab_size' is .*, not a whole number of at least 1"):
            read_model(path)
