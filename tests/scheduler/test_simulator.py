"""The simulator, its traces and its bound, on small fleets; all figures are simulated."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.traces import main as write_synthetic
from scheduler.balancer import RULES
from scheduler.simulator.__main__ import main as simulate
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import MI300X_14B, Simulator, SimulatorSettings
from scheduler.traces.stage_traces import STAGES, synthetic
from scheduler.traces.trace import TraceRollout, TraceTurn, read_trace, write_trace

STAGE = STAGES["stage1"]
ROLLOUTS = synthetic(STAGE, groups=8, siblings=16, seed=3)


def settings(kv_tokens: int, replicas: int = 2) -> SimulatorSettings:
    return SimulatorSettings(
        replicas=replicas,
        shape=EngineShape(kv_tokens=kv_tokens, max_running=1_024),
        cost=MI300X_14B,
        max_response_tokens=STAGE.max_response_tokens,
        max_turns=STAGE.max_turns,
    )


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_ends_every_rollout_no_sooner_than_the_bound(rule: str):
    result = Simulator(ROLLOUTS, rule, settings(60_000)).run()
    assert result.rollouts == len(ROLLOUTS)
    assert result.makespan_s >= result.lower_bound_s
    assert 0.0 < result.kv_utilisation <= 1.0


def test_a_rollout_alone_takes_as_long_as_the_bound():
    tool = TraceTurn(5, tool_tokens=4, tool_seconds=2.0)
    alone = replace(settings(60_000, replicas=1), rpc_s=0.0, cost=replace(MI300X_14B, per_sequence_s=0.1))
    result = Simulator([TraceRollout("a", 10, (tool, tool, TraceTurn(5)))], "least_requests", alone).run()
    assert result.makespan_s == pytest.approx(result.lower_bound_s, rel=1e-3)


def test_the_same_trace_gives_the_same_step():
    assert (
        Simulator(ROLLOUTS, "expected_kv", settings(60_000)).run()
        == Simulator(ROLLOUTS, "expected_kv", settings(60_000)).run()
    )


def test_worst_case_never_preempts_and_expected_kv_beats_it_where_kv_is_scarce():
    worst = Simulator(ROLLOUTS, "worst_case", settings(60_000)).run()
    ours = Simulator(ROLLOUTS, "expected_kv", settings(60_000)).run()
    assert worst.preemptions == 0
    assert ours.makespan_s < worst.makespan_s / 1.3


@pytest.mark.parametrize("as_json", [False, True])
def test_a_rule_that_cannot_hold_a_rollout_says_so_and_the_others_run(
    tmp_path: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRollout("g", 100, (TraceTurn(20),)), TraceRollout("h", 16, (TraceTurn(90),))])
    command = ["scheduler.simulator", "--trace", str(path), "--replicas", "1", "--kv-tokens", "144", "--rule", "all"]
    command += ["--block-tokens", "16"]
    monkeypatch.setattr("sys.argv", [*command, *(["--json"] if as_json else [])])
    simulate()
    said = capsys.readouterr().out
    reason = "needs at least 192 KV tokens (its prompt and the longest response it may have, in whole blocks)"
    if as_json:
        rows = {row["rule"]: row for row in json.loads(said)}
        assert rows.keys() == {*RULES}
        assert reason in rows["worst_case"]["cannot_hold"]
        assert all("makespan_s" in row for rule, row in rows.items() if rule != "worst_case")
    else:
        (line,) = [line for line in said.splitlines() if line.startswith("worst_case")]
        assert "cannot hold it" in line and reason in line


def test_a_trace_survives_its_file(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, ROLLOUTS)
    assert read_trace(path) == ROLLOUTS


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt_tokens": 5, "turns": []}, "'group' is missing"),
        ({"group": "g", "prompt_tokens": -5, "turns": [{"completion_tokens": 3}]}, "'prompt_tokens' is -5"),
        ({"group": "g", "prompt_tokens": 5, "turns": []}, "'turns' is empty"),
        ({"group": "g", "prompt_tokens": True, "turns": []}, "'prompt_tokens' is True, not a whole number"),
        ({"group": "g", "prompt_tokens": 5, "turns": [7]}, "'turns' is 7, not an object"),
        (
            {"group": "g", "prompt_tokens": 5, "turns": [{"completion_tokens": 3, "tool_seconds": None}]},
            "'tool_seconds' is None, not a number",
        ),
        (
            {
                "group": "g",
                "prompt_tokens": 5,
                "turns": [{"completion_tokens": 0, "tool_tokens": 0, "tool_seconds": 0}],
            },
            "'completion_tokens' is 0",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, row: dict[str, object], problem: str):
    path = tmp_path / "trace.jsonl"
    write_trace(path, ROLLOUTS[:1])
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"trace\.jsonl:2: {problem}"):
        read_trace(path)


@pytest.mark.parametrize(
    "options",
    [
        ["--groups", "0"],
        ["--siblings", "-1"],
        ["--seed", "-1"],
        ["--number", "3"],
        ["--out", "{folder}"],
        ["--out", "{folder}/nowhere/t.jsonl"],
    ],
)
def test_a_trace_that_cannot_be_made_is_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
):
    options = [option.format(folder=tmp_path) for option in options]
    assert write_synthetic(["--groups", "1", "--out", str(tmp_path / "trace.jsonl"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {options[0]}: ")
    assert not list(tmp_path.iterdir())
