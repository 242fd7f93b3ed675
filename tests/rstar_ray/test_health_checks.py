"""Health checks of a run, and the explanation of a slow step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.report.health_checks import CheckState, HealthCheck, health_checks, summary
from rstar_ray.report.run_record import RunRecord
from rstar_ray.report.slow import slow_data
from rstar_ray.run_dir.metrics import longest_rollout
from tests.rstar_ray.fabricate import summary as rollout

pytestmark = pytest.mark.usefixtures("without_fsync")
SETTINGS = {
    "seed": 0, "max_empty_steps": 10, "prompts_per_step": 4, "algorithm": {"rollouts_per_prompt": 16},
    "engine": {"dtype": "float32"}, "learner": {"dtype": "float32"},
}  # fmt: skip
PLACED: dict[str, Any] = {"rule": "expected_kv", "quarantined": [], "faults": [], "held_s": {}}
STEP: dict[str, Any] = {
    "reward_mean": 0.5, "tool_error_rate_correct": 0.05, "response_tokens_mean": 100.0,
    "rollouts": 64, "trained_trajectories": 32, "tokens_generated": 6_400, "tokens_per_s": 1_000.0, "calls_mean": 1.0,
    "generate_s": 6.0, "tools_s": 1.0, "verify_s": 0.5, "learn_s": 2.0, "publish_s": 0.4, "step_s": 10.0,
    "frac_truncated": 0.02, "frac_all_correct": 0.2, "frac_all_wrong": 0.1, "groups_kept": 3,
    "groups_dropped": 1, "entropy": 0.3, "grad_norm": 0.4, "logprob_diff_mean": 1e-7, "logprob_diff_max": 1e-6,
    "restarts": 0, "judge_retries": 0, "memory_bytes/driver": 2**27, "memory_bytes/learner": 2**32,
    "balancer/queue_len_max": 4, "balancer/in_flight_max": 9, "balancer/kv_util_mean": 0.7,
    "balancer/kv_util_max": 0.9, "balancer/kv_reserved_mean": 0.8, "balancer/num_preemptions": 0,
    "balancer/num_moves": 0, "balancer/num_recomputed_tokens": 0, "balancer/wait_p50_s": 0.1,
    "balancer/wait_p99_s": 2.0, "longest": None, "inter_step_s": 0.0, "balancer": PLACED,
}  # fmt: skip


def run_of(*rows: dict[str, Any], **settings: Any) -> RunRecord:
    steps = [STEP | {"stage": "stage1", "step": n, "rl_step": n} | row for n, row in enumerate(rows, 1)]
    return RunRecord(Path("/runs/r"), {"stage1": SETTINGS | settings}, [], steps, (), [], [], [])


def found(run: RunRecord) -> dict[str, HealthCheck]:
    return {one.signal: one for one in health_checks(run)}


@pytest.mark.parametrize(
    ("signal", "late", "state"),
    [
        ("Reward", {"reward_mean": 0.44}, CheckState.WARN),
        ("Reward", {"reward_mean": 0.3}, CheckState.BAD),
        ("Tool errors in correct rollouts", {"tool_error_rate_correct": 0.12}, CheckState.BAD),
        ("Entropy", {"entropy": 0.04}, CheckState.WARN),
        ("Entropy", {"entropy": 0.001}, CheckState.BAD),
        ("Entropy", {"entropy": 1.0}, CheckState.BAD),
        ("Entropy", {"entropy": None}, CheckState.UNKNOWN),
        ("Log-prob gap, engine to learner", {"logprob_diff_mean": 2e-5}, CheckState.WARN),
        ("Log-prob gap, engine to learner", {"logprob_diff_mean": 1e-3}, CheckState.BAD),
        ("Gradient norm", {"grad_norm": 5.0}, CheckState.WARN),
        ("Gradient norm", {"grad_norm": 0.0}, CheckState.WARN),
        ("Truncated rollouts", {"frac_truncated": 0.2}, CheckState.WARN),
        ("Truncated rollouts", {"frac_truncated": 0.4}, CheckState.BAD),
        ("Groups without signal", {"groups_kept": 1, "groups_dropped": 4}, CheckState.WARN),
        ("Groups without signal", {"groups_kept": 0, "groups_dropped": 4}, CheckState.BAD),
        ("Prompts all correct", {"frac_all_correct": 0.8}, CheckState.WARN),
        ("KV cache", {"balancer/kv_util_mean": 0.2}, CheckState.WARN),
        ("Preemptions", {"balancer/num_recomputed_tokens": 320}, CheckState.WARN),
        ("Preemptions", {"balancer/num_recomputed_tokens": 3_200}, CheckState.BAD),
        (
            "Memory",
            {"memory_bytes/driver": 2**28, "memory_bytes/learner": 2**32},
            CheckState.OK,
        ),  # too little to speak of
        ("Memory", {"memory_bytes/driver": 2**27, "memory_bytes/learner": 1.2 * 2**32}, CheckState.WARN),
        ("Memory", {"memory_bytes/driver": 2**29, "memory_bytes/learner": 2**32}, CheckState.BAD),
        ("Memory", {"memory_bytes/driver": 2**20, "memory_bytes/learner": 2**31}, CheckState.OK),
        ("Retries", {"judge_retries": 1}, CheckState.BAD),
        ("Dropped rollouts", {"rollouts": 63}, CheckState.BAD),
        ("Balancer", {"balancer": PLACED | {"quarantined": ["r1: odd"]}}, CheckState.WARN),
        ("Balancer", {"balancer": PLACED | {"faults": ["r1: 7 left"]}}, CheckState.BAD),
    ],
)
def test_each_signal_is_noticed_when_it_goes_wrong_and_no_other(signal: str, late: dict[str, Any], state: CheckState):
    asked = found(run_of(*[{}] * 30, *[late] * 10))
    assert asked[signal].state is state
    assert {one.state for name, one in asked.items() if name != signal} <= {CheckState.OK, CheckState.UNKNOWN}


def test_a_run_that_has_hardly_begun_or_has_learned_nothing_yet_has_what_is_known():
    assert health_checks(run_of()) == [] and summary([]) == "0 of 0 health checks are ok"
    unknown = dict.fromkeys(("entropy", "grad_norm", "logprob_diff_mean", "tool_error_rate_correct", "balancer"))
    asked = found(run_of(unknown))
    assert "KV cache" not in asked and asked["Entropy"].state is CheckState.UNKNOWN
    num_unknown = sum(one.state is CheckState.UNKNOWN for one in asked.values())
    assert f"; {num_unknown} have " in summary(list(asked.values()))


def test_the_gap_of_tokens_of_older_weights_is_judged_by_the_effective_sample_size():
    drifted = {"logprob_diff_mean": 2e-3, "token_age_max": 1, "ess_tokens": 0.9}
    limited = {"staleness": 1, "algorithm": {"min_ess": 0.3}}
    gap, nothing = "Log-prob gap, engine to learner", {"logprob_diff_mean": None, "ess_tokens": None}
    asked = found(run_of({"token_age_max": 0}, drifted, nothing, **limited))[gap]
    assert asked.state is CheckState.OK and "up to 1 step older; effective sample size at least 0.90" in asked.current
    low = found(run_of(drifted, drifted | {"ess_tokens": 0.2}, drifted, **limited))[gap]
    assert (low.state, low.rl_step) == (CheckState.WARN, 2)
    assert found(run_of(drifted))[gap].state is CheckState.UNKNOWN  # a run before these settings
    newest_alone = {"logprob_diff_mean": 2e-3, "token_age_max": 0, "ess_tokens": 0.9}
    assert found(run_of(newest_alone, **limited))[gap].state is CheckState.BAD


def test_dropped_rollouts_are_counted_with_the_settings_of_the_newest_stage_alone():
    run = run_of(*[{}] * 20, {"rollouts": 60})
    sft = {"prompts_per_step": 32, "algorithm": {"resample": "none", "keep": 2}}
    earlier = {"prompts_per_step": 5, "algorithm": {"resample": "none", "keep": 2}}
    config = {"sft": sft, "stage0": earlier, **run.config}
    assert found(replace(run, config=config))["Dropped rollouts"] == found(run)["Dropped rollouts"]
    assert found(run)["Dropped rollouts"].current.startswith("4 of ")


def test_waiting_rollouts_are_not_judged_where_they_may_be_of_later_steps():
    idle = {"balancer/kv_util_mean": 0.2}
    assert found(run_of(idle))["KV cache"].state is CheckState.WARN
    assert found(run_of(idle | {"staleness": 1}))["KV cache"].state is CheckState.UNKNOWN
    assert found(run_of({}, staleness=1))["KV cache"].state is CheckState.OK


def test_memory_that_the_last_step_could_not_read_is_still_checked():
    usual = {name: value for name, value in STEP.items() if name.startswith("memory_bytes/")}
    more = {"memory_bytes/learner": 2 * usual["memory_bytes/learner"]}
    run = run_of(*[{}] * 30, *[more] * 9, {})
    for name in usual:
        del run.steps[-1][name]
    assert found(run)["Memory"].state is CheckState.BAD


def test_the_speed_of_a_step_explains_it_only_where_all_its_tokens_were_sampled_in_it():
    slow = {"step_s": 20.0, "generate_s": 16.0, "rollout_s": 17.5, "tokens_per_s": 400.0}
    rows = [{"rollout_s": 7.5}] * 3
    for staleness, named in ((0, True), (1, False)):
        because = slow_data(run_of(*rows, slow | {"staleness": staleness}))["because"][-1]
        assert ("400 tokens/s, median 1,000" in because) is named


def test_the_longest_rollout_of_a_step_is_the_one_with_most_own_seconds():
    many = [rollout(sibling=n, generate_s=seconds, tool_s=tool) for n, (seconds, tool) in enumerate([(1, 9), (7, 1)])]
    longest = longest_rollout(many)
    assert longest is not None
    assert (longest["rollout_id"], longest["tool_s"], longest["turns"]) == ("g0/0", 9, 2)
    assert longest_rollout([]) is None
