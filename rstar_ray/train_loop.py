"""The loop of GRPO-RoC (arXiv:2508.20722 section 2), over Protocols: the same code drives 64 GPUs and a test's fakes.

It holds refs and summaries, never tokens. Legend: G trajectories kept per prompt, N rolled out.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from rstar_ray.algorithm.advantage import mean_advantage
from rstar_ray.algorithm.lr_schedule import rl_learning_rate
from rstar_ray.algorithm.update import LeftOut, UpdateResult
from rstar_ray.config import RunConfig
from rstar_ray.context import RunContext
from rstar_ray.draws import Draw, Draws
from rstar_ray.errors import RStarError
from rstar_ray.rollouts import (
    DroppedRollout,
    Group,
    TrainingRow,
    TrajectoryRef,
    apply_rules,
    resample,
    training_rows,
)
from rstar_ray.run_dir.ledger import RolloutStatus
from rstar_ray.run_dir.metrics import StepMetrics, step_metrics
from rstar_ray.stage_progress import StageProgress

MOST_DROPPED = 0.5
"""Largest share of a step's rollouts that infrastructure failures may end before the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step's results, for the log."""

    metrics: StepMetrics
    statuses: Mapping[str, RolloutStatus]  # of every rollout asked for, by its id
    advantages: Mapping[str, float]  # of the rows handed to the learner, by rollout id
    refs: tuple[TrajectoryRef, ...]  # of all finished rollouts, while the caller holds them
    dropped: tuple[DroppedRollout, ...]
    left_out: tuple[LeftOut, ...]  # rows that the learner did not train on
    update: UpdateResult | None  # None without training rows
    checksum: int | None  # of the weights that were published; None where they are the step's before


async def train_step(draw: Draw, context: RunContext, config: RunConfig, *, policy_version: int) -> StepRecord:
    """One GRPO-RoC step on a finished draw of 2G rollouts per prompt: resample on correct, update once, publish."""
    step, groups, dropped = draw.step, draw.groups, draw.dropped
    if len(dropped) > MOST_DROPPED * len(draw.requests):
        raise RStarError(
            f"step {step}: {len(dropped)} of {len(draw.requests)} rollouts were dropped: {dropped[0].reason}"
        )
    drawn_s, learner_version = time.monotonic(), policy_version

    def rows_of_kept() -> tuple[list[Group], list[TrainingRow]]:
        kept = [resample(group, config, step) for group in groups]
        return kept, training_rows(kept, config)

    kept, rows = await apply_rules(rows_of_kept, config, step)
    update = await context.learner.train_rl(rows, rl_learning_rate(config, step)) if rows else None
    learned_s = time.monotonic()
    checksum = None
    if update is not None:  # a refused one too: engines that slept meanwhile have dropped their weights
        policy_version += update.applied
        published = await context.services.publish(policy_version)
        checksum = published if update.applied else None
    published_s = time.monotonic()

    finished = [rollout for group in groups for rollout in group]
    left_out = rows_left_out(rows, update)
    statuses = rollout_statuses(groups, kept, rows=rows, left_out=left_out, dropped=dropped)
    if odd := statuses.keys() ^ {request.rollout_id for request in draw.requests}:
        raise RStarError(f"step {step}: {min(odd)} is not accounted for exactly once")
    return StepRecord(
        metrics=step_metrics(
            [rollout.summary for rollout in finished],
            stage=config.stage,
            step=step,
            policy_version=policy_version,
            learner_version=learner_version,
            kept_ids=[row.rollout_id for row in rows],
            left_out_ids=[row.rollout_id for row in left_out],
            seconds={
                "rollout_s": draw.waited_s,
                "learn_s": learned_s - drawn_s,
                "publish_s": 0.0 if update is None else published_s - learned_s,
                "step_s": draw.waited_s + published_s - drawn_s,
            },
            update=update,
            staleness=config.staleness,
            last_ended=draw.last,
        ),
        statuses=statuses,
        advantages={row.rollout_id: mean_advantage(row.advantage) for row in rows},
        left_out=left_out,
        update=update,
        checksum=checksum,
        refs=tuple(rollout.ref for rollout in finished),
        dropped=tuple(dropped),
    )


def rollout_statuses(
    groups: Sequence[Group],
    kept: Sequence[Group],
    *,
    rows: Sequence[TrainingRow],
    left_out: Sequence[LeftOut],
    dropped: Sequence[DroppedRollout],
) -> dict[str, RolloutStatus]:
    """The status of each rollout; a later one replaces an earlier one."""
    statuses = {rollout.summary.rollout_id: RolloutStatus.RESAMPLED_AWAY for group in groups for rollout in group}
    statuses |= {rollout.summary.rollout_id: RolloutStatus.EQUAL_REWARDS for group in kept for rollout in group}
    statuses |= {row.rollout_id: RolloutStatus.TRAINED for row in rows}
    statuses |= {row.rollout_id: RolloutStatus.LEFT_OUT for row in left_out}
    return statuses | {rollout.rollout_id: RolloutStatus.DROPPED for rollout in dropped}


def rows_left_out(rows: Sequence[TrainingRow], update: UpdateResult | None) -> tuple[LeftOut, ...]:
    """Of the rows handed to the learner those it did not train on: all of them where the update was not applied."""
    if update is None:
        return ()
    if update.applied:
        return update.left_out
    named = {row.rollout_id for row in update.left_out}
    others = (LeftOut(row.rollout_id, update.reason) for row in rows if row.rollout_id not in named)
    return (*update.left_out, *others)


async def train_steps(
    draws: Draws, context: RunContext, config: RunConfig, progress: StageProgress
) -> AsyncIterator[tuple[StepRecord, StageProgress]]:
    """The stage's remaining steps; logging, checkpoints and stops wrap them from outside."""
    while progress.step < config.steps and not progress.ended:
        draw = await draws.take(progress.step + 1)
        record = await train_step(draw, context, config, policy_version=progress.policy_version)
        progress = progress.after(
            record.metrics,
            draw.position,
            config.until,
            warmup_steps=config.warmup_steps,
            min_ess=config.algorithm.min_ess,
        )
        yield record, progress
