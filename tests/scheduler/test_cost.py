"""What mistakes of a placement cost, and files of costs."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from scheduler.cost import EngineCost, PlacementCost, read_cost, risk_of
from scheduler.simulator import __main__ as command_line

COST = EngineCost(fixed_s=0.01, per_sequence_s=1e-4, per_context_s=1e-7, per_prefill_s=1e-4, per_prefill_context_s=1e-8)


def test_the_risk_is_one_percent_at_ten_steps_and_all_is_filled_where_computing_again_is_free():
    def risk(steps: float, idle: float = 0.4) -> float:
        return risk_of(PlacementCost(preemption_steps=steps, idle_share=idle))

    assert risk_of(None) == 0.01 and risk(10.0) == pytest.approx(0.01)
    assert risk(5.0) == pytest.approx(0.04) and risk(10.0, 0.8) == pytest.approx(0.02)
    assert risk(0.5) == risk(0.0) == risk(0.0, 0.0) == 0.9999
    assert risk(100.0) == risk(5.0, 0.0) == 0.01


@pytest.mark.parametrize(
    "text, said",
    [
        ("[1]", "'the record' is [1], not an object"),
        ("{", "Expecting"),
        (json.dumps({**asdict(COST), "fixed_s": -1}), "'fixed_s' is -1; give seconds, 0 or more"),
        (json.dumps({**asdict(COST), "fixed_s": 0}), "'fixed_s' is 0; every decode step takes time"),
        (json.dumps({"fixed_s": 1}), "'per_context_s' is missing; `make calibrate"),
        (json.dumps({**asdict(COST), "per_step_s": 1}), "'per_step_s' is unknown (known: fixed_s, "),
    ],
)
def test_a_file_of_costs_is_refused_with_its_field(
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
    monkeypatch.setattr("sys.argv", ["scheduler.simulator", "--trace", str(trace), "--cost", str(path)])
    with pytest.raises(SystemExit, match=r"^scheduler\.simulator: "):
        command_line.main()
