"""The planner's arithmetic, against the figures on paper."""

import json
from pathlib import Path

import pytest

from scheduler.plan import QWEN3_14B, Gpu, best_separated, place, read_model
from scheduler.traces import STAGES


def colocated(*, gpus: int = 64, memory_gb: float = 192.0, tensor_parallel: int = 1):
    return place(
        QWEN3_14B,
        Gpu(memory_gb=memory_gb),
        STAGES["stage1"],
        engine_gpus=gpus,
        learner_gpus=gpus,
        colocated=True,
        tensor_parallel=tensor_parallel,
        micro_batch_tokens=20_480,
        rollouts=16_384,
    )


def test_the_papers_model_keeps_160_kib_of_kv_per_token():
    assert QWEN3_14B.kv_bytes_per_token == 160 * 1024
    assert QWEN3_14B.weights_gb == pytest.approx(29.6)


def test_64_large_gpus_hold_engine_and_learner_and_two_thirds_of_a_million_kv_tokens():
    placement = colocated()
    assert placement.memory.trained_state == pytest.approx(3.7)
    assert 550_000 < placement.kv_tokens_per_replica < 800_000
    assert placement.memory.total == pytest.approx(192.0)
    assert not placement.problems


def test_what_does_not_fit_says_what_to_change():
    placement = colocated(gpus=2, memory_gb=80.0)
    assert any("tensor_parallel 2 instead of 1" in problem for problem in placement.problems)
    assert any("more learner GPUs" in problem for problem in placement.problems)


def test_more_gpus_shorten_both_phases():
    few, many = colocated(gpus=32), colocated(gpus=64)
    assert many.learn_s == pytest.approx(few.learn_s / 2)
    assert many.generate_s < few.generate_s


def test_pools_are_split_where_the_slower_phase_is_shortest():
    best = best_separated(
        QWEN3_14B, Gpu(), STAGES["stage1"], gpus=64, tensor_parallel=1, micro_batch_tokens=20_480, rollouts=16_384
    )
    assert best is not None and not best.problems
    assert best.engine_gpus + best.learner_gpus == 64
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
