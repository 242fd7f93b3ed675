"""Whether a run is well, and why a step was slow."""

from pathlib import Path
from typing import Any

import pytest

from rstar_ray.report.run_record import RunRecord
from rstar_ray.report.verdicts import State, Verdict, summary, verdicts
from rstar_ray.run_dir.metrics import longest_rollout
from tests.rstar_ray.fabricate import summary as rollout

pytestmark = pytest.mark.usefixtures("without_fsync")
SETTINGS = {
    "seed": 0, "max_empty_steps": 10, "prompts_per_step": 4, "algorithm": {"rollouts_per_prompt": 16},
    "engine": {"dtype": "float32"}, "learner": {"dtype": "float32"},
}  # fmt: skip
PLACED = {
    "rule": "expected_kv", "waiting_most": 4, "in_flight_most": 9, "kv_used_share": 0.7, "kv_used_share_most": 0.9,
    "kv_reserved_share": 0.8, "preemptions": 0, "moves": 0, "recomputed_tokens": 0, "wait_p50_s": 0.1,
    "wait_p99_s": 2.0, "set_aside": [], "faults": [], "held_s": {},
}  # fmt: skip
STEP: dict[str, Any] = {
    "stage": "stage1", "reward_mean": 0.5, "tool_error_share_correct": 0.05, "response_tokens_mean": 100.0,
    "rollouts": 64, "trained_trajectories": 32, "tokens_generated": 6_400, "tokens_per_s": 1_000.0, "calls_mean": 1.0,
    "generate_s": 6.0, "tools_s": 1.0, "verify_s": 0.5, "learn_s": 2.0, "publish_s": 0.4, "step_s": 10.0,
    "share_truncated": 0.02, "share_all_right": 0.2, "share_all_wrong": 0.1, "groups_kept": 3,
    "groups_equal_dropped": 1, "entropy": 0.3, "grad_norm": 0.4, "logprob_diff_mean": 1e-7, "logprob_diff_max": 1e-6,
    "restarts": 0, "judge_retries": 0, "balancer": PLACED, "memory_bytes": {"driver": 2**27, "learner": 2**32},
    "longest": None, "before_s": 0.0,
}  # fmt: skip


def run_of(*rows: dict[str, Any]) -> RunRecord:
    steps = [STEP | {"step": n, "rl_step": n} | row for n, row in enumerate(rows, 1)]
    return RunRecord(Path("/runs/r"), {"stage1": SETTINGS}, [], steps, (), [], [], [])


def found(run: RunRecord) -> dict[str, Verdict]:
    return {one.signal: one for one in verdicts(run)}


@pytest.mark.parametrize(
    ("signal", "late", "state"),
    [
        ("Reward", {"reward_mean": 0.44}, State.LOOK),
        ("Reward", {"reward_mean": 0.3}, State.BAD),
        ("Tool errors in right answers", {"tool_error_share_correct": 0.12}, State.BAD),
        ("Entropy", {"entropy": 0.04}, State.LOOK),
        ("Entropy", {"entropy": 0.001}, State.BAD),
        ("Entropy", {"entropy": 1.0}, State.BAD),
        ("Entropy", {"entropy": None}, State.UNKNOWN),
        ("Engine against learner", {"logprob_diff_mean": 2e-5}, State.LOOK),
        ("Engine against learner", {"logprob_diff_mean": 1e-3}, State.BAD),
        ("Gradient norm", {"grad_norm": 5.0}, State.LOOK),
        ("Cut off by the budget", {"share_truncated": 0.2}, State.LOOK),
        ("Cut off by the budget", {"share_truncated": 0.4}, State.BAD),
        ("Groups without signal", {"groups_kept": 1, "groups_equal_dropped": 4}, State.LOOK),
        ("Groups without signal", {"groups_kept": 0, "groups_equal_dropped": 4}, State.BAD),
        ("Prompts all right", {"share_all_right": 0.8}, State.LOOK),
        ("KV cache", {"balancer": PLACED | {"kv_used_share": 0.2}}, State.LOOK),
        ("Preemptions", {"balancer": PLACED | {"recomputed_tokens": 320}}, State.LOOK),
        ("Preemptions", {"balancer": PLACED | {"recomputed_tokens": 3_200}}, State.BAD),
        ("Memory", {"memory_bytes": {"driver": 2**28, "learner": 2**32}}, State.WELL),  # too little to speak of
        ("Memory", {"memory_bytes": {"driver": 2**27, "learner": 1.2 * 2**32}}, State.LOOK),
        ("Memory", {"memory_bytes": {"driver": 2**29, "learner": 2**32}}, State.BAD),
        ("Memory", {"memory_bytes": {"driver": 2**20, "learner": 2**31}}, State.WELL),
        ("Retries", {"judge_retries": 1}, State.BAD),
        ("Dropped rollouts", {"rollouts": 63}, State.BAD),
        ("Balancer", {"balancer": PLACED | {"set_aside": ["r1: odd"]}}, State.LOOK),
        ("Balancer", {"balancer": PLACED | {"faults": ["r1: 7 left"]}}, State.BAD),
    ],
)
def test_each_signal_is_noticed_when_it_goes_wrong_and_no_other(signal: str, late: dict[str, Any], state: State):
    asked = found(run_of(*[{}] * 30, *[late] * 10))
    assert asked[signal].state is state
    assert {one.state for name, one in asked.items() if name != signal} <= {State.WELL, State.UNKNOWN}


def test_a_run_that_has_hardly_begun_or_has_learned_nothing_yet_has_what_is_known():
    assert verdicts(run_of()) == [] and summary([]) == "0 of 0 signals are well"
    unknown = dict.fromkeys(("entropy", "grad_norm", "logprob_diff_mean", "tool_error_share_correct", "balancer"))
    asked = found(run_of(unknown))
    assert "KV cache" not in asked and asked["Entropy"].state is State.UNKNOWN


def test_the_longest_rollout_of_a_step_is_the_one_with_most_seconds_of_its_own():
    many = [rollout(sibling=n, generate_s=seconds, tool_s=tool) for n, (seconds, tool) in enumerate([(1, 9), (7, 1)])]
    longest = longest_rollout(many)
    assert longest is not None and (longest.rollout_id, longest.tool_s, longest.turns) == ("g0/0", 9, 2)
    assert longest_rollout([]) is None
