"""The status of every rollout of a run: `ledger.jsonl`, one row per step, each rollout in exactly one status.

A row has the counts, the rollout ids of each status, and the reasons for rollouts that were left out or dropped.
"""

import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from rstar_ray.run_dir.durable import append_row, cut_rows, read_rows
from rstar_ray.run_dir.tail import GrowingRows

log = logging.getLogger(__name__)

LEDGER = "ledger.jsonl"


class RolloutStatus(StrEnum):
    """How a rollout of a training step ended."""

    TRAINED = "trained"
    RESAMPLED_AWAY = "resampled_away"
    EQUAL_REWARDS = "in_equal_groups"
    LEFT_OUT = "left_out"
    DROPPED = "dropped"
    ABANDONED = "abandoned"  # drawn for a later step than the one at which the stage ended early


ALWAYS = tuple(status for status in RolloutStatus if status is not RolloutStatus.ABANDONED)
"""The statuses that every row has. `abandoned` is only in rows with such rollouts, by their full ids."""


def append_ledger(
    run_path: Path,
    statuses: Mapping[str, RolloutStatus],
    *,
    stage: str,
    step: int,
    reasons: Mapping[str, str],
    advantages: Mapping[str, float],
) -> None:
    """Append a step's row: statuses by rollout id, reasons of those left out or dropped, and advantages."""
    by_status: dict[str, list[str]] = {status: [] for status in ALWAYS}
    for rollout_id, status in statuses.items():
        by_status.setdefault(status, []).append(rollout_id.removeprefix(f"{stage}/{step}/"))
    append_row(
        run_path / LEDGER,
        {
            "stage": stage,
            "step": step,
            "rollouts": len(statuses),
            **{status: len(ids) for status, ids in by_status.items()},
            "ids": by_status,
            "reasons": {name.removeprefix(f"{stage}/{step}/"): reason for name, reason in reasons.items()},
            "advantages": {
                name.removeprefix(f"{stage}/{step}/"): round(advantage, 4) for name, advantage in advantages.items()
            },
        },
        sync=True,  # the next checkpoint depends on it
    )


def cut_ledger(run_path: Path, *, stage: str, after_step: int) -> None:
    """Remove the rows of steps after the checkpoint, which the run repeats. Log missing rows of earlier steps."""
    if (run_path / LEDGER).exists():
        cut_rows(run_path / LEDGER, stage=stage, after_step=after_step)
    known = {row["step"] for row in read_rows(run_path / LEDGER) if row["stage"] == stage}
    if lost := sorted(set(range(1, after_step + 1)) - known):
        log.info(f"{LEDGER}: {stage} step {_named(lost)}: the row is missing; the status of its rollouts is lost")


def _named(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def ledger_faults(run_path: Path, *, reached: Mapping[str, int] | None = None) -> list[str]:
    """One line per missing or repeated step, inconsistent sum, and rollout with two statuses or none.

    `reached`: by stage, the step up to which all rows must exist.
    """
    table = GrowingRows(run_path / LEDGER, "stage", "step", "rollouts", "ids", "reasons", *ALWAYS)
    table.read()
    rows, found = table.rows, list(table.faults)
    steps: dict[str, list[int]] = {stage: [] for stage in reached or {}}
    for row in rows:
        name = f"{LEDGER}: {row['stage']} step {row['step']}"
        steps.setdefault(row["stage"], []).append(row["step"])
        ids = [rollout_id for status in RolloutStatus for rollout_id in row["ids"].get(status, ())]
        if len(ids) != len(set(ids)):
            twice = next(rollout_id for rollout_id in ids if ids.count(rollout_id) > 1)
            found.append(f"{name}: {twice} has two statuses")
        if len(ids) != row["rollouts"] or any(
            len(row["ids"].get(status, ())) != row.get(status, 0) for status in RolloutStatus
        ):
            found.append(f"{name}: {row['rollouts']} rollouts do not add up")
        if unexplained := sorted(
            {*row["ids"][RolloutStatus.DROPPED], *row["ids"][RolloutStatus.LEFT_OUT]} - row["reasons"].keys()
        ):
            found.append(f"{name}: {unexplained[0]} was dropped or excluded without a reason")
    for stage, logged in steps.items():
        if logged != list(range(1, len(logged) + 1)):
            found.append(f"{LEDGER}: the steps of {stage} are not 1, 2, 3, ...")
        elif reached and len(logged) < reached.get(stage, 0):
            lost = range(len(logged) + 1, reached[stage] + 1)
            found.append(f"{LEDGER}: {stage} has no row of step {_named(lost)}, which the run has completed")
    if rows and not found:
        totals = ", ".join(
            f"{count:,} {status}"
            for status in RolloutStatus
            if (count := sum(row.get(status, 0) for row in rows)) or status in ALWAYS
        )
        log.info(f"ledger: {sum(row['rollouts'] for row in rows):,} rollouts in {len(rows)} steps: {totals}")
    return found
