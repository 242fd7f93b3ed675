import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.algorithm.update import UpdateFigures
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.metrics import (
    MetricsLog,
    SftMetrics,
    StepMetrics,
    StepTimings,
    share_rollout_time,
    step_metrics,
)
from rstar_ray.trajectory import StopReason
from tests.rstar_ray.fabricate import summary

TIMINGS = StepTimings(rollout_s=4.0, learn_s=2.0, publish_s=0.5, step_s=7.0)
UPDATE = UpdateFigures(
    loss=-0.01, grad_norm=0.5, entropy=0.3, clip_share=0.01, logprob_diff_mean=1e-6, logprob_diff_max=1e-5, lr=1e-4
)


def metrics(step: int = 1, stage: str = "stage1", **kwargs) -> StepMetrics:
    summaries = kwargs.pop("summaries", [summary("a", 0), summary("a", 1, reward=0.0)])
    arguments = {"kept_ids": ["a/0", "a/1"], "timings": TIMINGS, "update": UPDATE, "policy_version": step} | kwargs
    return step_metrics(summaries, stage=stage, step=step, **arguments)


def test_a_step_counts_rollouts_groups_and_tokens():
    summaries = [
        summary("a", 0, calls=2, failed=1, sampled=100, response=150),
        summary("a", 1, reward=0.0, calls=4, failed=4, sampled=50, response=250, stop=StopReason.TRUNCATED),
        summary("b", 0, calls=2, sampled=30, response=100),
        summary("b", 1, calls=0, sampled=20, response=100),
    ]
    row = metrics(summaries=summaries)
    assert row.share_max_turns == 0.0
    limited = [replace(one, stop_reason=StopReason.MAX_TURNS) for one in summaries[2:]]
    assert metrics(summaries=[*summaries[:2], *limited]).share_max_turns == 0.5
    assert (row.reward_mean, row.pass_rate) == (0.75, 0.75)
    assert row.tool_error_share_correct == 1 / 4
    assert (row.response_tokens_mean, row.share_truncated, row.calls_mean, row.turns_mean) == (150, 0.25, 2, 3)
    assert (row.groups_kept, row.groups_equal_dropped, row.rollouts, row.trained_trajectories) == (1, 1, 4, 2)
    assert (row.tokens_generated, row.tokens_per_s) == (200, 50.0)
    assert (row.loss, row.lr) == (-0.01, 1e-4)


def test_a_sink_that_fails_is_a_shown_line_and_the_others_go_on(tmp_path: Path, logged: list[str]):
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
    assert [line.split(":")[0] for line in logged if "left out" in line] == [
        "TensorBoard's file from step 2 on is left out",
        "step 3 in metrics.jsonl is left out",
        "the end of metrics.jsonl is left out",
    ]
    assert sum("reward" in line for line in logged) == 3  # the person watching still sees every step


def test_a_kept_id_that_was_never_rolled_out_is_refused():
    with pytest.raises(ValueError, match="kept_ids"):
        metrics(kept_ids=["z/9"])


def test_phases_of_the_rollout_add_up_to_its_wall_time():
    shares = share_rollout_time(10.0, [summary(generate_s=3, tool_s=1), summary(generate_s=3, tool_s=2, verify_s=1)])
    assert shares == (6.0, 3.0, 1.0)
    assert share_rollout_time(2.0, []) == (2.0, 0.0, 0.0)


def events(folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(folder)


def test_going_on_from_a_checkpoint_never_doubles_a_step(tmp_path: Path):
    with MetricsLog(tmp_path, stage="sft", after_step=0, num_steps=9) as log:
        for step in (1, 2, 3):
            log.write(SftMetrics(step=step, loss=1.0, lr=1e-3, tokens_per_s=10, step_s=1))
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
        log.write(SftMetrics(step=1, loss=float("nan"), lr=1e-3, tokens_per_s=10, step_s=1))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
