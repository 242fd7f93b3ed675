"""What mistakes of a placement cost, and files of costs."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.cost import EngineCost, PlacementCost, placement_cost, read_cost, risk_of
from scheduler.twin import command_line
from scheduler.twin.simulate import MI300X_14B

COST = EngineCost(fixed_s=0.01, per_sequence_s=1e-4, per_context_s=1e-7, per_prefill_s=1e-4, per_prefill_context_s=1e-8)


def test_a_preemption_and_an_empty_seat_in_steps_of_a_full_batch():
    cost = placement_cost(COST, kv_tokens=100_000, max_running=1_000, context_tokens=1_000)
    step_s = 0.01 + 100 * 1e-4 + 100_000 * 1e-7  # a hundred fit
    assert cost.preemption_steps == pytest.approx((0.1 + 1_000 * 500 * 1e-8) / step_s)
    assert cost.idle_share == pytest.approx(0.01 / step_s)
    seats = placement_cost(COST, kv_tokens=100_000, max_running=10, context_tokens=1_000)
    assert seats.idle_share == pytest.approx(0.01 / (0.01 + 10 * 1e-4 + 10_000 * 1e-7))
    alone = placement_cost(COST, kv_tokens=100, max_running=10, context_tokens=1_000)
    assert alone.idle_share == pytest.approx(0.01 / (0.01 + 1e-4 + 1_000 * 1e-7))


def test_the_risk_is_one_percent_at_ten_steps_and_all_is_filled_where_computing_again_is_free():
    def risk(steps: float, idle: float = 0.4) -> float:
        return risk_of(PlacementCost(preemption_steps=steps, idle_share=idle))

    assert risk_of(None) == 0.01 and risk(10.0) == pytest.approx(0.01)
    assert risk(5.0) == pytest.approx(0.04) and risk(10.0, 0.8) == pytest.approx(0.02)
    assert risk(0.5) == risk(0.0) == risk(0.0, 0.0) == 0.9999
    assert risk(100.0) == risk(5.0, 0.0) == 0.01


def test_where_few_share_a_cache_what_is_left_free_for_one_of_them_costs_more_than_computing_it_again():
    def risk(
        running: float, *, steps: float = 50.0, idle: float = 0.5, life: float = 800.0, taught: bool = True
    ) -> float:
        cost = PlacementCost(preemption_steps=steps, idle_share=idle, running=running, life_steps=life)
        return risk_of(cost, taught=taught)

    at_a_look = 0.5 * 800 / (8 * 8 * 50)  # what an empty seat loses in a life, over eight looks' preemptions
    assert risk(8.0) == pytest.approx(1 - (1 - at_a_look) ** 8)
    assert risk(16.0) == pytest.approx(1 - (1 - at_a_look / 2) ** 8)
    assert risk(32.0) == pytest.approx(1 - (1 - at_a_look / 4 / 8) ** 8)
    assert risk(32.0, taught=False) == pytest.approx(1 - (1 - at_a_look / 4 / 2) ** 8)
    assert risk(64.0) == risk(8.0, life=0.0) == risk(8.0, idle=0.0) == 0.01
    assert risk(8.0, steps=1e4) == 0.01 and risk(2.0, steps=1.0) == 0.9999


def test_the_simulated_gpu_has_the_usual_risk_where_its_rollouts_are_long():
    cost = placement_cost(MI300X_14B, kv_tokens=400_000, max_running=1_024, context_tokens=5_000, life_steps=4_500)
    assert cost.running == 80.0
    assert 8.0 < cost.preemption_steps < 12.0 and 0.01 <= risk_of(cost) <= 0.02


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "1", None, True, [1]])
def test_costs_are_numbers_of_seconds(wrong: Any):
    for name in asdict(COST):
        with pytest.raises(ValueError, match=f"'{name}' is .*; give seconds, 0 or more"):
            replace(COST, **{name: wrong})


@pytest.mark.parametrize(
    "text, said",
    [
        ("[1]", "it holds no JSON object"),
        ("{", "Expecting"),
        (json.dumps({**asdict(COST), "fixed_s": -1}), "'fixed_s' is -1; give seconds, 0 or more"),
        (json.dumps({**asdict(COST), "fixed_s": 0}), "'fixed_s' is 0; no decode step takes no time"),
        (json.dumps({"fixed_s": 1}), "'per_sequence_s' is missing; give seconds, as `make calibrate"),
        (json.dumps({**asdict(COST), "per_step_s": 1}), "'per_step_s' is no cost; remove it"),
    ],
)
def test_a_file_of_costs_is_refused_with_its_field_and_the_mend(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        read_cost(path)
    assert str(refused.value).startswith(f"{path}: {said}")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"group": "a", "prompt_tokens": 4, "turns": [{"completion_tokens": 9, "tool_tokens": 0, '
                     '"tool_seconds": 0}]}\n')  # fmt: skip
    monkeypatch.setattr("sys.argv", ["scheduler.twin", "--trace", str(trace), "--cost", str(path)])
    with pytest.raises(SystemExit, match=r"^scheduler\.twin: "):
        command_line.main()


def test_a_file_of_costs_may_leave_out_those_that_have_a_default(tmp_path: Path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"fixed_s": 1, "per_sequence_s": 0, "per_context_s": 0, "per_prefill_s": 0.5}))
    assert read_cost(path) == EngineCost(fixed_s=1, per_sequence_s=0, per_context_s=0, per_prefill_s=0.5)
