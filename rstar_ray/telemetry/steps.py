"""A step's row as metrics."""

import os
import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from rstar_ray.errors import Stopped
from rstar_ray.run_dir.ledger import Fate
from rstar_ray.run_dir.metrics import SftMetrics, StepMetrics
from rstar_ray.telemetry.meter import Meter


@contextmanager
def under_way(meter: Meter, stage: str) -> Generator[None, None, None]:
    """Around a stage: what ends otherwise than as it should stays under way, and is missed."""
    meter.set("rstar_run_under_way", 1, stage=stage)
    try:
        yield
    except Stopped:
        meter.set("rstar_run_under_way", 0, stage=stage)
        raise
    meter.set("rstar_run_under_way", 0, stage=stage)


def meter_step(meter: Meter, row: StepMetrics | SftMetrics, run_path: Path) -> None:
    """Every number of a step that a person watches, and the room that is left on disk."""
    stage = row.stage
    _meter_disk(meter, run_path)
    meter.set("rstar_step", row.step, stage=stage)
    meter.set("rstar_step_end_timestamp_seconds", time.time(), stage=stage)
    meter.set("rstar_step_seconds", row.step_s, stage=stage)
    meter.set("rstar_learning_rate", row.lr, stage=stage)
    meter.set("rstar_loss", row.loss, stage=stage)
    meter.add("rstar_steps_total", 1, stage=stage)
    if isinstance(row, SftMetrics):
        meter.set("rstar_validation_loss_nats", row.val_loss, stage=stage)
    else:
        _meter_rollouts(meter, row)
        _meter_update(meter, row)


def _meter_rollouts(meter: Meter, row: StepMetrics) -> None:
    stage = row.stage
    meter.set("rstar_reward_ratio", row.reward_mean, stage=stage)
    meter.set("rstar_pass_ratio", row.pass_rate, stage=stage)
    meter.set("rstar_tool_error_correct_ratio", row.tool_error_share_correct, stage=stage)
    meter.set("rstar_response_mean_tokens", row.response_tokens_mean, stage=stage)
    meter.set("rstar_truncated_ratio", row.share_truncated, stage=stage)
    meter.set("rstar_max_turns_ratio", row.share_max_turns, stage=stage)
    meter.set("rstar_turns_mean", row.turns_mean, stage=stage)
    meter.set("rstar_calls_mean", row.calls_mean, stage=stage)
    meter.set("rstar_groups_all_right_ratio", row.share_all_right, stage=stage)
    meter.set("rstar_groups_all_wrong_ratio", row.share_all_wrong, stage=stage)
    if groups := row.groups_kept + row.groups_equal_dropped:
        meter.set("rstar_groups_empty_ratio", row.groups_equal_dropped / groups, stage=stage)
    meter.set("rstar_generation_tokens_per_second", row.tokens_per_s, stage=stage)
    meter.add("rstar_generated_tokens_total", row.tokens_generated, stage=stage)
    meter.add("rstar_rollout_restarts_total", row.restarts, stage=stage)
    meter.add("rstar_judge_retries_total", row.judge_retries, stage=stage)


def _meter_update(meter: Meter, row: StepMetrics) -> None:
    stage = row.stage
    meter.set("rstar_grad_norm", row.grad_norm, stage=stage)
    meter.set("rstar_entropy_nats", row.entropy, stage=stage)
    meter.set("rstar_clip_ratio", row.clip_share, stage=stage)
    meter.set("rstar_logprob_diff_mean_nats", row.logprob_diff_mean, stage=stage)
    meter.set("rstar_logprob_diff_max_nats", row.logprob_diff_max, stage=stage)
    meter.set("rstar_policy_version", row.policy_version, stage=stage)
    phases = {
        "generate": row.generate_s,
        "tools": row.tools_s,
        "verify": row.verify_s,
        "learn": row.learn_s,
        "publish": row.publish_s,
    }
    for phase, seconds in phases.items():
        meter.set("rstar_phase_seconds", seconds, stage=stage, phase=phase)
    meter.set("rstar_phase_seconds", max(0.0, row.step_s - sum(phases.values())), stage=stage, phase="other")


def meter_fates(meter: Meter, fates: Iterable[Fate], stage: str) -> None:
    """What became of a step's rollouts."""
    for fate, count in Counter(fates).items():
        meter.add("rstar_ledger_rollouts_total", count, stage=stage, fate=str(fate))


def _meter_disk(meter: Meter, path: Path) -> None:
    try:
        found = os.statvfs(path)
    except OSError:  # a file system that is gone for a moment is no reason to end a run
        return
    meter.set("rstar_disk_free_bytes", found.f_bavail * found.f_frsize)
    meter.set("rstar_disk_size_bytes", found.f_blocks * found.f_frsize)
