"""The stages of the recipe (arXiv:2508.20722 section 4): SFT, then RL in three parts, each evaluated at its end.

Everything that acts is behind Protocols; this module decides what happens in which order, what is logged, what is
saved, and where a stopped run goes on.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rstar_ray.algorithm.lr_schedule import sft_schedule
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.checkpointing import LEARNED, saving
from rstar_ray.config import RunConfig
from rstar_ray.crew import Crew
from rstar_ray.data.order import DataPosition, digest_of_problems, digest_of_rows, draw
from rstar_ray.errors import RStarError, Stopped
from rstar_ray.evaluation.evaluator import HELD_OUT, evaluated, forget_evaluations, run_evaluation
from rstar_ray.hard_set import hard_set
from rstar_ray.reward.judge import answer_place
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import read_object
from rstar_ray.run_dir.folder import Checkpoint, RunDir, checkpoint_name, hashed, refuse_damaged_end
from rstar_ray.run_dir.ledger import LEDGER, forget_fates, write_fates
from rstar_ray.run_dir.metrics import MetricsLog, PlacementFigures, SftMetrics, StepMetrics
from rstar_ray.stage_progress import StageProgress, refuse_other_data
from rstar_ray.telemetry.steps import meter_fates, meter_step, under_way
from rstar_ray.train_loop import StepRecord, TrainingSystem, train_steps
from rstar_ray.trajectory import Problem

log = logging.getLogger(__name__)

STAGES = ("sft", "stage1", "stage2", "stage3")


async def run_sft(
    config: RunConfig,
    train: Sequence[SftExample],
    validation: Sequence[SftExample],
    crew: Crew,
    run_dir: RunDir,
    *,
    source: str = "",
) -> Checkpoint:
    """Supervised steps, then the stage's checkpoint; goes on where a stopped run left off.

    `source` is the digest of the file that the rows are of.
    """
    sft, stage = config.sft, config.stage
    progress, _ = await _start(config, crew, run_dir)
    progress = _on(config, progress, digest_of_rows(train, source))
    schedule = sft_schedule(sft)
    metrics_log = MetricsLog(
        run_dir.path,
        stage=stage,
        after_step=progress.step,
        num_steps=sft.steps,
        print_every=20,
        wandb=config.telemetry.wandb,
    )
    async with saving(config, crew, run_dir) as saves:
        with metrics_log, under_way(crew.meter, stage):
            while progress.step < sft.steps:
                started_s = time.monotonic()
                step = progress.step + 1
                batch, position = draw(train, sft.batch_size, progress.position, seed=config.seed, stage=stage)
                lr = schedule.at(step - 1)
                update = await crew.learner.train_sft(batch, lr)
                if not update.applied:
                    log.info(f"{stage} step {step}: the update is not applied: {update.reason}")
                version = progress.policy_version + update.applied
                progress = replace(progress, step=step, policy_version=version, position=position)
                due = step % config.checkpoint.every_steps == 0 or step == sft.steps
                val_loss = await crew.learner.evaluate_sft(validation) if due and validation else None
                seconds = time.monotonic() - started_s
                row = SftMetrics(
                    stage=stage,
                    step=step,
                    loss=update.loss,
                    lr=lr,
                    tokens_per_s=update.input_tokens / seconds,
                    step_s=seconds,
                    val_loss=val_loss,
                )
                metrics_log.write(row)
                meter_step(crew.meter, row, run_dir.path)
                saves.refuse_failed()
                last = step == sft.steps
                stop = reason_to_stop(config, crew, update, step, last=last)
                if due or stop:
                    await saves.take(progress, finishes=last and not stop)
                if stop:
                    await saves.settled()
                    raise stop
    return _finished(run_dir, stage)


def reason_to_stop(
    config: RunConfig, crew: Crew, update: UpdateResult | None, step: int, *, last: bool
) -> RStarError | None:
    """What ends the run after this step, once a checkpoint is taken; None to continue.

    After `--optimizer.max-bad-updates` updates in a row that were not finite, the weights are those before these
    updates. The checkpoint's data position is behind their batches, so the same command does not draw them again.
    """
    limit = config.optimizer.max_bad_updates
    if update is not None and update.bad_updates >= limit:
        return RStarError(
            f"{config.stage} step {step}: {update.bad_updates} updates in a row were not finite and are not applied "
            f"(--optimizer.max-bad-updates {limit}): {update.reason}. Hint: --optimizer.save-bad-updates FOLDER keeps "
            "their rows; the same command continues with the next batch"
        )
    if crew.stopping() and not last:
        return Stopped(f"stopped after step {step} of {config.stage}, with a checkpoint")
    return None


async def run_rl(
    config: RunConfig, problems: Sequence[Problem], crew: Crew, run_dir: RunDir, *, heldout: Sequence[Problem] = ()
) -> Checkpoint:
    """GRPO-RoC steps, logged, evaluated and saved around; goes on where a stopped run left off."""
    _show_inactive_format(config, problems, crew)
    progress, before = await _start(config, crew, run_dir)
    await crew.publish(progress.policy_version)
    await _teach(before, crew)
    await _evaluate_if_due(config, progress, heldout, crew, run_dir)
    system = TrainingSystem(rollouts=crew.rollouts, learner=crew.learner, publish=crew.publish)
    if config.drop_solved:
        problems = await hard_set(problems, system, config, crew, run_dir)
    progress = _on(config, progress, digest_of_problems(problems))
    await _placed(crew)  # what came before the first step is none of its own
    forget_fates(run_dir.path, stage=config.stage, after_step=progress.step)
    metrics_log = MetricsLog(
        run_dir.path,
        stage=config.stage,
        after_step=progress.step,
        num_steps=config.steps,
        wandb=config.telemetry.wandb,
    )
    async with saving(config, crew, run_dir) as saves:
        with metrics_log, under_way(crew.meter, config.stage):
            if progress.step == 0 and config.steps == 0:
                await saves.take(progress, finishes=True)
            ended_s = time.monotonic()
            async for record, reached in train_steps(problems, system, config, progress):
                before_s, ended_s = time.monotonic() - ended_s - record.metrics.step_s, time.monotonic()
                progress = reached
                metrics_log.write(replace(await _with_placement(record.metrics, crew), before_s=max(0.0, before_s)))
                meter_step(crew.meter, record.metrics, run_dir.path)
                meter_fates(crew.meter, record.fates.values(), config.stage)
                _write_fates(record, config.stage, run_dir)
                _show_odd(record, crew)
                await _record(record, config, crew, run_dir)
                saves.refuse_failed()
                last = progress.step == config.steps or progress.ended != ""
                if progress.ended:
                    log.info(f"{config.stage} ends after step {progress.step}: {progress.ended}")
                stop = reason_to_stop(config, crew, record.update, progress.step, last=last)
                if progress.step % config.checkpoint.every_steps == 0 or last or stop:
                    await saves.take(progress, finishes=last and not stop)
                if stop:
                    await saves.settled()
                    raise stop
                if not last:
                    await _evaluate_if_due(config, progress, heldout, crew, run_dir)
    return _finished(run_dir, config.stage)


def _show_inactive_format(config: RunConfig, problems: Sequence[Problem], crew: Crew) -> None:
    """A line where resampling has no format to penalise: the penalty then only counts failed calls."""
    if config.algorithm.resample not in ("paper", "release") or not config.algorithm.roc_answer_format:
        return
    rules = {one.reward or config.reward.name for one in problems if answer_place(config.reward, one) is None}
    without = [f"reward {rule}" for rule in sorted(rules)]
    if config.tools.environment:
        without = [f"environment {config.tools.environment}"]
    if without:
        log.info(
            f"{config.stage}: --algorithm.roc-answer-format is inactive with {', '.join(without)}: no marked answer is "
            "read there, so failed tool calls alone decide which correct rollouts are kept"
        )


async def _evaluate_if_due(
    config: RunConfig, progress: StageProgress, heldout: Sequence[Problem], crew: Crew, run_dir: RunDir
) -> None:
    """Before the first step and every so many; the stage's end is evaluated by whoever runs the stages."""
    step, every = progress.step, config.evaluate.every_steps
    due = not _start_was_evaluated(config, run_dir) if step == 0 else every > 0 and step % every == 0
    if heldout and due and not evaluated(run_dir, config.stage, step):
        await run_evaluation(config, {HELD_OUT: heldout}, crew, run_dir, step=step)
        await _placed(crew)  # what the balancer did for it is no part of the next step's row


def _start_was_evaluated(config: RunConfig, run_dir: RunDir) -> bool:
    """Whether a curve has its first point already: the stage before ended with it."""
    before = None if config.model else previous_checkpoint(run_dir, config.stage)
    return before is not None and evaluated(run_dir, before.stage, before.step)


async def _start(config: RunConfig, crew: Crew, run_dir: RunDir) -> tuple[StageProgress, Path | None]:
    """Bring the learner to where this stage stands: its own newest checkpoint, or what the stage before left.

    Returns the folder that it was brought from too; None for a policy from elsewhere, or none.
    """
    newest = await run_dir.newest_whole_checkpoint(config.stage)
    forget_evaluations(run_dir, config.stage, newest.step if newest else 0)
    if newest is not None:
        progress = StageProgress.read(newest.path)
        last = config.sft.steps if config.stage == "sft" else config.steps
        if (newest.step >= last or progress.ended) and run_dir.finished_checkpoint(config.stage) is None:
            run_dir.finish_stage(config.stage, newest.step)  # stopped between the two
        await crew.learner.load_checkpoint(newest.path)
        log.info(f"{config.stage}: going on after step {newest.step}")
        return progress, newest.path
    before = None if config.model else previous_checkpoint(run_dir, config.stage)
    policy_version = 0
    if config.model:
        await crew.learner.set_policy(Path(config.model))
    elif before is not None:
        await hashed(partial(refuse_damaged_end, before), before.path)
        await crew.learner.load_checkpoint(before.path)
        policy_version = StageProgress.read(before.path).policy_version
    if config.fresh_optimizer:
        await crew.learner.reset_optimizer()
    return StageProgress(policy_version=policy_version, position=DataPosition()), before and before.path


async def _teach(folder: Path | None, crew: Crew) -> None:
    """Have the balancer know again what it had learned by this checkpoint; without that it learns anew."""
    if crew.teach is not None and folder is not None:
        with (
            best_effort(f"{LEARNED} of {folder.name}"),
            suppress(FileNotFoundError),
        ):  # nobody could say then
            await crew.teach(read_object(folder / LEARNED))


def _on(config: RunConfig, progress: StageProgress, data: str) -> StageProgress:
    """Raises `ConfigError` for data that the stage was not begun on."""
    refuse_other_data(config, progress, data)
    return replace(progress, data=data)


def previous_checkpoint(run_dir: RunDir, stage: str) -> Checkpoint | None:
    """Where the newest finished stage before it ended; None where there is none."""
    position = STAGES.index(stage) if stage in STAGES else 0
    found = (run_dir.finished_checkpoint(before) for before in reversed(STAGES[:position]))
    return next((checkpoint for checkpoint in found if checkpoint is not None), None)


def _finished(run_dir: RunDir, stage: str) -> Checkpoint:
    checkpoint = run_dir.finished_checkpoint(stage)
    assert checkpoint is not None, f"{stage} ended without its checkpoint"
    return checkpoint


async def _with_placement(metrics: StepMetrics, crew: Crew) -> StepMetrics:
    """The step's row with what the balancer did and the memory held; a book that does not close is shown."""
    placed = await _placed(crew)
    for fault in placed.faults if placed else ():
        log.info(f"step {metrics.step}: the balancer's books do not close: {fault}")
    row = replace(metrics, balancer=placed)
    with best_effort("the run's memory and its publish"):
        published = crew.published() if metrics.publish_s else None
        return replace(row, memory_bytes=crew.memory_bytes(), publish=published)
    return row


async def _placed(crew: Crew) -> PlacementFigures | None:
    """What the balancer did since this was asked last, as far as it can be told."""
    if crew.placed is not None:
        with best_effort("the balancer's row"):
            return await crew.placed()
    return None


def _write_fates(record: StepRecord, stage: str, run_dir: RunDir) -> None:
    """The step's row of the ledger, which is a promise: without it the run ends, and goes on with this step undone."""
    try:
        write_fates(
            run_dir.path,
            record.fates,
            stage=stage,
            step=record.metrics.step,
            reasons={one.rollout_id: one.reason for one in (*record.dropped, *record.left_out)},
            advantages=record.advantages,
        )
    except OSError as failed:
        failed.filename = failed.filename or str(run_dir.path / LEDGER)  # a write does not say of what
        raise


def _show_odd(record: StepRecord, crew: Crew) -> None:
    if record.metrics.groups_kept == 0:
        log.info(f"step {record.metrics.step}: every group has equal rewards; nothing to learn from, weights unchanged")
    elif record.left_out:
        first = record.left_out[0]
        log.info(
            f"step {record.metrics.step}: the learner left out {len(record.left_out)} rollouts, "
            f"such as {first.rollout_id}: {first.reason}"
        )
    if record.dropped:
        log.info(f"step {record.metrics.step}: {len(record.dropped)} rollouts dropped: {record.dropped[0].reason}")


async def _record(record: StepRecord, config: RunConfig, crew: Crew, run_dir: RunDir) -> None:
    every, step = config.checkpoint.trajectories_every_steps, record.metrics.step
    if every and (step - 1) % every == 0:  # after a checkpoint, so that its update can be repeated
        path = run_dir.trajectories_path / f"{checkpoint_name(config.stage, step)}.jsonl"
        with best_effort(path.name):
            await crew.record(record.refs, path, stage=config.stage, step=step, trained=True)
