import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.algorithm.update import UpdateResult
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.metrics import (
    MetricsLog,
    StepMetrics,
    current_row,
    step_metrics,
)
from rstar_ray.trajectory import StopReason
from tests.rstar_ray.fabricate import summary

SECONDS = {"rollout_s": 4.0, "learn_s": 2.0, "publish_s": 0.5, "step_s": 7.0}
LEARNED = {"loss": -0.01, "grad_norm": 0.5, "entropy": 0.3, "lr": 1e-4}
UPDATE = UpdateResult(applied=True, reason="", step=1, metrics=LEARNED)


def metrics(step: int = 1, stage: str = "stage1", **kwargs) -> StepMetrics:
    summaries = kwargs.pop("summaries", [summary("a", 0), summary("a", 1, reward=0.0)])
    arguments = {"kept_ids": ["a/0", "a/1"], "seconds": SECONDS, "update": UPDATE, "policy_version": step}
    arguments |= {"learner_version": step} | kwargs
    return step_metrics(summaries, stage=stage, step=step, **arguments)


def test_the_ages_of_trained_tokens_are_counted_by_the_versions_that_sampled_them():
    summaries = [
        replace(summary("a", 0), version_tokens=((4, 30), (5, 10))),
        replace(summary("a", 1, reward=0.0), version_tokens=((5, 60),)),
        replace(summary("b", 0), version_tokens=((1, 500),)),  # not trained on
    ]
    row = metrics(summaries=summaries, learner_version=5, policy_version=6)
    assert (row["token_age_mean"], row["token_age_max"]) == (0.3, 1)
    assert (row["token_age_frac/0"], row["token_age_frac/1"]) == (0.7, 0.3)


def test_every_age_up_to_the_staleness_has_a_share():
    """A gauge of Prometheus keeps its value of the step before where a step has none."""
    older = [replace(summary("a", 0), version_tokens=((4, 30),))]
    trained, not_trained = (metrics(summaries=older, learner_version=5, staleness=2, kept_ids=kept).values
                            for kept in (["a/0"], []))  # fmt: skip
    shares = {name: value for name, value in trained.items() if name.startswith("token_age_frac/")}
    assert shares == {"token_age_frac/0": 0, "token_age_frac/1": 1, "token_age_frac/2": 0}
    assert "token_age_frac/0" not in not_trained


def test_a_step_counts_rollouts_groups_and_tokens():
    summaries = [
        summary("a", 0, calls=2, failed=1, sampled=100, response=150),
        summary("a", 1, reward=0.0, calls=4, failed=4, sampled=50, response=250, stop=StopReason.TRUNCATED),
        summary("b", 0, calls=2, sampled=30, response=100),
        summary("b", 1, calls=0, sampled=20, response=100),
    ]
    row = metrics(summaries=summaries)
    limited = [replace(one, stop_reason=StopReason.MAX_TURNS) for one in summaries[2:]]
    assert metrics(summaries=[*summaries[:2], *limited])["frac_max_turns"] == 0.5
    want = {
        "frac_max_turns": 0, "reward_mean": 0.75, "pass_rate": 0.75, "tool_error_rate_correct": 1 / 4,
        "response_tokens_mean": 150, "frac_truncated": 0.25, "calls_mean": 2, "turns_mean": 3, "groups_kept": 1,
        "groups_dropped": 1, "frac_groups_dropped": 0.5, "rollouts": 4, "trained_trajectories": 2,
        "tokens_generated": 200, "tokens_per_s": 50, "other_s": 0.5, "loss": -0.01, "lr": 1e-4,
    }  # fmt: skip
    assert {name: row[name] for name in want} == want
    assert "tool_error_rate_correct" not in metrics(summaries=[replace(one, num_calls=0) for one in summaries]).values


def test_calls_are_counted_by_tool_and_components_of_a_reward_are_averaged():
    first = replace(summary("a", 0, calls=3, failed=1), tools=("search", "search", "python"))
    second = replace(summary("a", 1, calls=1, failed=1), tools=("",), reward_components={"length": -0.5, "right": 1.0})
    row = metrics(summaries=[first, replace(second, reward_components={"length": 0.5}), second]).values
    assert {name: value for name, value in row.items() if name.startswith(("tool_", "reward_c"))} == {
        "tool_error_rate_correct": 3 / 5, "tool_calls/python": 1 / 3, "tool_calls/search": 2 / 3,
        "tool_error_rate/python": 0, "tool_error_rate/search": 0.5,
        "reward_component/length": 0, "reward_component/right": 1,
    }  # fmt: skip


def test_a_name_that_is_not_in_the_registry_is_refused():
    with pytest.raises(ValueError, match=r"unknown metric 'new_one'. Hint: add it to rstar_ray/telemetry/registry.py"):
        metrics().plus({"new_one": 1.0})


def test_a_row_of_an_older_version_is_read_under_todays_names():
    placed = {"rule": "static", "waiting_most": 4, "kv_used_share": 0.5, "set_aside": ["r1: odd"], "held_s": {"no": 1}}
    old = {"stage": "stage1", "step": 2, "share_all_right": 0.25, "loss": None, "balancer": placed}
    row = current_row(old | {"memory_bytes": {"driver": 7}, "publish": {"load_s": 0.5}, "before_s": 3.0})
    want = {
        "stage": "stage1", "step": 2, "frac_all_correct": 0.25, "loss": None, "kl": None, "inter_step_s": 3.0,
        "balancer/queue_len_max": 4, "balancer/kv_util_mean": 0.5, "memory_bytes/driver": 7, "publish/load_s": 0.5,
    }  # fmt: skip
    assert {name: row[name] for name in want} == want
    assert row["balancer"] == {"rule": "static", "held_s": {"no": 1}, "quarantined": ["r1: odd"]}
    assert "share_all_right" not in row
    assert current_row(row) == row


def test_a_sink_that_fails_is_a_shown_line_and_the_others_continue(tmp_path: Path, logged: list[str]):
    class Full:
        def write(self, *_: object) -> None:
            raise OSError("no space left on device")

        close = flush = write

    with MetricsLog(tmp_path, stage="stage1", after_step=0, num_steps=3) as log:
        log.write(metrics(1))
        log._sinks["TensorBoard's file"].close()
        log._sinks["TensorBoard's file"] = Full()
        log.write(metrics(2))
        log._file.close()  # type: ignore[union-attr]
        log._file = Full()  # type: ignore[assignment]
        log.write(metrics(3))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [line.split(":")[0] for line in logged if "is skipped" in line] == [
        "TensorBoard's file from step 2 on is skipped",
        "step 3 in metrics.jsonl is skipped",
        "the end of metrics.jsonl is skipped",
    ]
    assert sum("reward" in line for line in logged) == 3  # the person watching still sees every step


def events(folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(folder)


def test_resuming_from_a_checkpoint_never_doubles_a_step(tmp_path: Path):
    with MetricsLog(tmp_path, stage="sft", after_step=0, num_steps=9) as log:
        for step in (1, 2, 3):
            log.write(StepMetrics(stage="sft", step=step, values={"loss": 1.0}))
    with MetricsLog(tmp_path, stage="stage1", after_step=0, num_steps=9) as log:
        for step in (1, 2, 3):
            log.write(metrics(step=step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "stage1", "step": 4, "rew')  # killed while writing
    with MetricsLog(tmp_path, stage="stage1", after_step=1, num_steps=9) as log:
        log.write(metrics(step=2))
    rows = [(row["stage"], row["step"]) for row in read_rows(tmp_path / "metrics.jsonl")]
    assert rows == [("sft", 1), ("sft", 2), ("sft", 3), ("stage1", 1), ("stage1", 2)]
    board = events(str(tmp_path / "tensorboard" / "stage1"))
    board.Reload()
    assert [event.step for event in board.Scalars("reward_mean")] == [1, 2]


def test_a_figure_that_is_not_finite_is_kept_as_null(tmp_path: Path):
    with MetricsLog(tmp_path, stage="sft", after_step=0, num_steps=1) as log:
        log.write(StepMetrics(stage="sft", step=1, values={"loss": float("nan")}))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
