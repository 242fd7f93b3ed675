import json
import math
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from scipy.special import stdtrit

from rstar_ray.errors import ConfigError
from rstar_ray.report.experiment import (
    POOL,
    T_975,
    Arm,
    Spread,
    at_tokens,
    pooled_errors,
    results,
    write_experiment,
)
from rstar_ray.report.run_record import RunRecord, stage_spans
from tests.rstar_ray.fabricate import run_directory


def record(errors: list[tuple[float | None, int]], scores: dict[int, float], tokens: int = 100) -> RunRecord:
    """One stage: (share of failed calls, calls) of correct rollouts by step, held-out scores by step."""
    steps: list[dict[str, Any]] = [
        {"stage": "stage1", "step": number, "rl_step": number, "tool_error_share_correct": share,
         "calls_in_correct": calls, "tokens_generated": tokens, "response_tokens_mean": 50.0 + number,
         "entropy": 0.5 if number % 2 else None}
        for number, (share, calls) in enumerate(errors, 1)
    ]  # fmt: skip
    evaluations = [
        {"stage": "stage1", "set": "held-out", "rl_step": step, "avg_at_k": score} for step, score in scores.items()
    ]
    return RunRecord(Path("run"), {}, [], steps, stage_spans(steps), evaluations, [], [])


def start(errors: float, score: float) -> dict[str, float | None]:
    return {
        "tool_error_share_correct": errors,
        "avg_at_k": score,
        "right_after_failed_call": score - 0.01,
        "right_without_failed_call": score,
    }


def test_intervals_are_students():
    for count in range(2, len(T_975) + 1):
        assert T_975[count - 1] == pytest.approx(stdtrit(count - 1, 0.975), abs=5e-4)
    spread = Spread((0.1, 0.2, 0.4))
    assert spread.half_width == pytest.approx(stdtrit(2, 0.975) * stdev(spread.values) / math.sqrt(3), abs=1e-3)
    assert spread.mean == pytest.approx(0.7 / 3)
    assert math.isnan(Spread((0.5,)).half_width)
    assert Spread((0.5,)).shown("{:.1f}".format) == "0.5"
    assert Spread((1.0, 3.0)).shown("{:.1f}".format) == "2.0 ± 12.7"
    many = Spread(tuple(range(20)))
    assert many.half_width == pytest.approx(1.96 * stdev(many.values) / math.sqrt(20))


def test_steps_are_pooled_by_their_calls():
    assert pooled_errors(record([(0.5, 10), (0.0, 30)], {}).steps) == pytest.approx(5 / 40)
    assert pooled_errors(record([(None, 0), (0.25, 4)], {}).steps) == 0.25
    assert math.isnan(pooled_errors(record([(None, 0)], {}).steps))


def test_accuracy_at_as_many_tokens_lies_between_two_evaluations():
    run = record([(0.1, 1)] * 4, {2: 0.6, 4: 0.8})
    assert at_tokens(run, 0.4, 0) == pytest.approx(0.4)
    assert at_tokens(run, 0.4, 100) == pytest.approx(0.5)
    assert at_tokens(run, 0.4, 200) == pytest.approx(0.6)
    assert at_tokens(run, 0.4, 350) == pytest.approx(0.75)
    assert at_tokens(run, 0.4, 900) == pytest.approx(0.8)


def test_arms_are_compared_at_equal_updates_and_at_the_tokens_of_the_thriftiest():
    early = [(0.9, 100)] * 5
    plain = [record([*early, *[(0.3, 100)] * 5, *[(share, 50)] * POOL], {20: 0.7 + share}) for share in (0.2, 0.3)]
    roc = [record([*early, *[(share, 50)] * 15], {20: 0.8}, tokens=200) for share in (0.02, 0.04)]
    one, other = results([plain, roc], ["plain", "RoC"], [start(0.25, 0.3), start(0.2, 0.3)])
    assert one.errors.values == pytest.approx((0.2, 0.3)) and other.errors.values == pytest.approx((0.02, 0.04))
    assert one.errors_left.values == pytest.approx((0.2 / 0.6, 0.3 / 0.6))  # from 0.9 and 0.3 in equal parts
    assert other.errors_left.values == pytest.approx((0.02 / 0.6, 0.04 / 0.6))
    assert one.accuracy.values == pytest.approx((0.9, 1.0)) and other.accuracy.values == (0.8, 0.8)
    assert one.accuracy_gained.values == (0, 0) and other.accuracy_gained.values == pytest.approx((-0.1, -0.2))
    assert one.accuracy_at_tokens.values == pytest.approx((0.9, 1.0))
    assert other.accuracy_at_tokens.values == pytest.approx((0.55, 0.55))  # half its tokens
    assert one.tokens.values == pytest.approx((65.5, 65.5)) and one.entropy.mean == 0.5


@pytest.mark.long
def test_an_experiment_is_a_table_and_figures(tmp_path: Path):
    stages = {"stage1": 20}
    sft = [run_directory(tmp_path / f"sft-{seed}", seed=seed, stages={}) for seed in (0, 1)]
    arms = [
        Arm(name, [run_directory(tmp_path / f"{mode}-{s}", seed=s, resample=mode, stages=stages) for s in (0, 1)])
        for name, mode in (("plain GRPO", "none"), ("RoC", "paper"))
    ]
    path = write_experiment(tmp_path, arms, start_from=sft)
    text = path.read_text()
    assert "The SFT policies, 2 seeds: " in text and "| plain GRPO |" in text and "| RoC |" in text
    plain, roc = json.loads((tmp_path / "experiment.json").read_text())
    assert sum(plain["errors"]["values"]) > 2 * sum(roc["errors"]["values"])
    arms[1].runs.pop()
    with pytest.raises(ConfigError, match="different numbers of runs"):
        write_experiment(tmp_path, arms, start_from=sft)
