"""The planner's choice of a placement rule for given lengths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.plan import PlanConfig, parsed, plan, report, row
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.trajectory_log import readable
from rstar_ray.trajectory import Problem
from scheduler.planner.gpus import EXPECTED, GPUS
from scheduler.planner.model_shape import QWEN3_14B
from scheduler.planner.rule_choice import COMPARED, RuleTimes, of_size, recommended_rule, rule_times
from scheduler.planner.step_time import decode_step_s, engine_cost
from scheduler.simulator.engine_model import EngineShape
from scheduler.traces.stage_traces import StageShape, synthetic
from scheduler.traces.trace import TraceRollout, TraceTurn, read_trace, write_trace
from tests.rstar_ray.fabricate import decode, trajectory

BRIEF = StageShape(max_response_tokens=512, max_turns=3, mean_response_tokens=200, calls_mean=1.0)
BRIEF_STEP = synthetic(BRIEF, groups=8, siblings=8, seed=1)
COST = engine_cost(QWEN3_14B, GPUS["h100"], EXPECTED, 1)


def chosen(**times: tuple[float, float]) -> str:
    return recommended_rule({rule: RuleTimes(first_s=first, later_s=later) for rule, (first, later) in times.items()})


def test_later_steps_decide_and_a_first_step_breaks_ties():
    assert chosen(expected_kv=(100, 100), least_requests=(101, 99)) == "expected_kv"
    assert chosen(expected_kv=(100, 100), least_requests=(200, 90)) == "least_requests"
    assert chosen(expected_kv=(200, 80), least_requests=(100, 100)) == "expected_kv"
    assert chosen(expected_kv=(130, 100), least_requests=(100, 101), least_sessions=(90, 120)) == "least_requests"


def test_a_step_of_another_size_has_whole_groups_of_all_of_the_trace():
    groups = list(dict.fromkeys(rollout.group for rollout in BRIEF_STEP))
    half = of_size(BRIEF_STEP, 32)
    assert [rollout.group for rollout in half[::8]] == [f"0:{name}" for name in groups[::2]]
    assert [replace(rollout, group=rollout.group[2:]) for rollout in half] == [
        rollout for rollout in BRIEF_STEP if rollout.group in groups[::2]
    ]
    more = of_size(BRIEF_STEP, 160)
    assert len(more) == 160 and len({rollout.group for rollout in more}) == 20
    assert len(of_size(BRIEF_STEP, 1)) == 8


def test_rules_are_compared_by_simulated_steps():
    longest = max(rollout.prompt_tokens + rollout.response_tokens for rollout in BRIEF_STEP)
    scarce, plenty = (
        rule_times(
            BRIEF_STEP,
            per_replica=32,
            replicas=64,
            shape=EngineShape(kv_tokens=(longest // 16 + 1) * 16 * rollouts, max_running=256),
            cost=COST,
            max_response_tokens=512,
            max_turns=3,
        )
        for rollouts in (3, 64)
    )
    for rule, times in plenty.items():
        assert scarce[rule].later_s > 1.2 * times.later_s
        assert times.later_s == pytest.approx(plenty["least_requests"].later_s, rel=0.1)
    for times in (scarce["least_requests"], plenty["least_requests"]):
        assert times.first_s == times.later_s  # it learns nothing


def test_the_simulators_engine_has_the_planners_costs():
    cost, gpu = COST, GPUS["h100"]
    few = decode_step_s(QWEN3_14B, gpu, EXPECTED, 1, 8, 8 * 4_000)
    assert cost.step_s(8, 8 * 4_000) == pytest.approx(few, rel=0.05)  # reading the weights dominates
    assert engine_cost(QWEN3_14B, gpu, EXPECTED, 2).per_context_s == pytest.approx(cost.per_context_s / 2)


def test_a_recorded_step_is_a_trace(tmp_path: Path):
    problem = Problem(id="sum-1", problem="What is 2 + 3?", answer="5")
    recorded = trajectory(problem, [("print(2+3)", "5", None), ("five", "", None)], reward=1.0)
    line = json.dumps(readable(recorded, decode, stage="stage1", step=1))
    path = tmp_path / "stage1-step-000001.jsonl"
    path.write_text(line + "\n")
    (rollout,) = read_trace(path)
    assert rollout.prompt_tokens == len(recorded.prompt_ids)
    assert rollout.response_tokens == len(recorded.response_ids)
    assert [turn.completion_tokens for turn in rollout.turns] == [turn.num_tokens for turn in recorded.turns]
    assert (rollout.turns[0].tool_seconds, rollout.turns[1].tool_tokens) == (recorded.turns[0].tool_s, 0)
    other = json.loads(line) | {"prompt_ids": [1, 2, 3]}  # an agent's sibling with another prompt
    silent = json.loads(line) | {"prompt_ids": [], "turns": []}
    path.write_text("\n".join([line, json.dumps(other), json.dumps(silent)]) + "\n")
    assert [one.prompt_tokens for one in read_trace(path)] == [len(recorded.prompt_ids), 3]
    path.write_text(line.replace('"tool_s"', '"tool"') + "\n")
    with pytest.raises(ValueError, match=r"step-000001.jsonl:1: not a recorded trajectory: .*tool_s"):
        read_trace(path)


def test_a_plan_with_a_trace_recommends_a_rule_for_it(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    write_trace(path, BRIEF_STEP)
    config = parsed(["--gpus", "1", "--gpu-memory-gb", "192", "--offload", "--prompts", "4", "--trace", str(path)])
    model, placement, separated = plan(config)
    said = report(config, model, placement, separated)
    assert f"Qwen3-14B, {path}: 4 x 32 rollouts, at most " in said and "--balancer.rule expected_kv is rec" in said
    found = row(config, model, placement)
    assert set(found["by_rule_s"]) == set(COMPARED) and found["recommended_rule"] == "expected_kv"
    assert placement.step_s < plan(replace(config, trace=""))[1].step_s  # shorter rollouts than stage 1's


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), ("", "the trace is empty"), ("[1]\n", "jsonl:1: "), ('{"group": "a"}\n', "prompt_tokens")],
)
def test_a_trace_that_cannot_be_planned_is_named(tmp_path: Path, content: str | None, problem: str):
    path = tmp_path / "mine.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"--trace: .*{problem}.*Hint: give a file of RUN/trajectories"):
        plan(PlanConfig(gpus=1, trace=str(path)))
    with pytest.raises(ConfigError, match="--stage: has no effect with --trace"):
        parsed(["--trace", str(path), "--stage", "stage2"])


def test_a_prompt_larger_than_a_synthetic_one_needs_its_kv(tmp_path: Path):
    path = tmp_path / "long.jsonl"
    write_trace(path, [TraceRollout("a", 100_000, (TraceTurn(50),))] * 2)
    needed = plan(PlanConfig(gpus=1, gpu_memory_gb=80.0, offload=True, trace=str(path)))[1].problems
    assert any("one rollout may need 100050" in problem for problem in needed), needed
