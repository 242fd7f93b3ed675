"""What became of every rollout of a run, by step: `ledger.jsonl`, a row a step, each rollout in one state.

Every count leads to the rollouts behind it: their ids are in the row, and where our own side failed the reason.
"""

import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from rstar_ray.run_dir.durable import append_row, cut_rows, read_rows
from rstar_ray.run_dir.tail import GrowingRows

log = logging.getLogger(__name__)

LEDGER = "ledger.jsonl"


class Fate(StrEnum):
    """How a rollout of a training step ended."""

    TRAINED = "trained"
    RESAMPLED_AWAY = "resampled_away"
    EQUAL_REWARDS = "in_equal_groups"
    LEFT_OUT = "left_out"
    DROPPED = "dropped"


def write_fates(
    run_path: Path,
    fates: Mapping[str, Fate],
    *,
    stage: str,
    step: int,
    reasons: Mapping[str, str],
    advantages: Mapping[str, float],
) -> None:
    """Append a step's row. `fates` by rollout id; `reasons` of those that were left out or dropped.

    `advantages` of those handed to the learner.
    """
    by_fate: dict[str, list[str]] = {fate: [] for fate in Fate}
    for rollout_id, fate in fates.items():
        by_fate[fate].append(rollout_id.removeprefix(f"{stage}/{step}/"))
    append_row(
        run_path / LEDGER,
        {
            "stage": stage,
            "step": step,
            "rollouts": len(fates),
            **{fate: len(ids) for fate, ids in by_fate.items()},
            "ids": by_fate,
            "reasons": {name.removeprefix(f"{stage}/{step}/"): reason for name, reason in reasons.items()},
            "advantages": {
                name.removeprefix(f"{stage}/{step}/"): round(advantage, 4) for name, advantage in advantages.items()
            },
        },
        sync=True,  # before the checkpoint that counts on it
    )


def forget_fates(run_path: Path, *, stage: str, after_step: int) -> None:
    """Of steps that are done again, from a checkpoint. Steps up to it whose row is gone are shown."""
    if (run_path / LEDGER).exists():
        cut_rows(run_path / LEDGER, stage=stage, after_step=after_step)
    known = {row["step"] for row in read_rows(run_path / LEDGER) if row["stage"] == stage}
    if lost := sorted(set(range(1, after_step + 1)) - known):
        log.info(f"{LEDGER}: {stage} step {_named(lost)}: the row is gone, and what became of its rollouts with it")


def _named(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def ledger_faults(run_path: Path, *, reached: Mapping[str, int] | None = None) -> list[str]:
    """Steps missing or twice, sums that do not add up, and rollouts in two states or none, a line each.

    `reached`: by stage, the step up to which all rows must be there.
    """
    table = GrowingRows(run_path / LEDGER, "stage", "step", "rollouts", "ids", "reasons", *Fate)
    table.read()
    rows, found = table.rows, list(table.faults)
    steps: dict[str, list[int]] = {stage: [] for stage in reached or {}}
    for row in rows:
        name = f"{LEDGER}: {row['stage']} step {row['step']}"
        steps.setdefault(row["stage"], []).append(row["step"])
        ids = [rollout_id for fate in Fate for rollout_id in row["ids"][fate]]
        if len(ids) != len(set(ids)):
            twice = next(rollout_id for rollout_id in ids if ids.count(rollout_id) > 1)
            found.append(f"{name}: {twice} is in two states")
        if len(ids) != row["rollouts"] or any(len(row["ids"][fate]) != row[fate] for fate in Fate):
            found.append(f"{name}: {row['rollouts']} rollouts do not add up")
        if unexplained := sorted({*row["ids"][Fate.DROPPED], *row["ids"][Fate.LEFT_OUT]} - row["reasons"].keys()):
            found.append(f"{name}: {unexplained[0]} was dropped or left out without a reason")
    for stage, logged in steps.items():
        if logged != list(range(1, len(logged) + 1)):
            found.append(f"{LEDGER}: the steps of {stage} are not 1, 2, 3, ...")
        elif reached and len(logged) < reached.get(stage, 0):
            lost = range(len(logged) + 1, reached[stage] + 1)
            found.append(f"{LEDGER}: {stage} has no row of step {_named(lost)}, which the run has gone through")
    if rows and not found:
        totals = ", ".join(f"{sum(row[fate] for row in rows):,} {fate}" for fate in Fate)
        log.info(f"ledger: {sum(row['rollouts'] for row in rows):,} rollouts in {len(rows)} steps: {totals}")
    return found
