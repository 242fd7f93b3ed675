"""The stages of the recipe (arXiv:2508.20722 section 4): SFT, then RL in three parts, each evaluated at its end.

Everything that acts is behind Protocols; this module decides what happens in which order, what is logged, what is
saved, and where a stopped run resumes.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rstar_ray.algorithm.lr_schedule import sft_learning_rate
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.checkpointing import BALANCER_STATE, Saving, saving
from rstar_ray.config import RunConfig
from rstar_ray.context import RunContext
from rstar_ray.data.order import DataPosition, digest_of_problems, digest_of_rows, draw
from rstar_ray.draws import Draws
from rstar_ray.errors import NothingLearned, RStarError, Stopped
from rstar_ray.evaluation.evaluator import HELD_OUT, evaluated, forget_evaluations, run_evaluation
from rstar_ray.hard_set import hard_set
from rstar_ray.reward.judge import answer_place
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import read_object
from rstar_ray.run_dir.folder import Checkpoint, RunDir, checkpoint_name, hashed, refuse_damaged_end
from rstar_ray.run_dir.ledger import LEDGER, RolloutStatus, append_ledger, cut_ledger
from rstar_ray.run_dir.metrics import BalancerStats, MetricsLog, StepMetrics
from rstar_ray.run_dir.served_weights import WEIGHTS, WeightsRecord
from rstar_ray.run_dir.sinks import projects
from rstar_ray.stage_progress import StageProgress, nothing_to_learn, refuse_other_data
from rstar_ray.telemetry.steps import export_ledger, export_step, stage_active
from rstar_ray.train_loop import StepRecord, train_steps
from rstar_ray.trajectory import Problem

log = logging.getLogger(__name__)

STAGES = ("sft", "stage1", "stage2", "stage3")


async def run_sft(
    config: RunConfig,
    train: Sequence[SftExample],
    validation: Sequence[SftExample],
    context: RunContext,
    *,
    source: str = "",
) -> Checkpoint:
    """Supervised steps, then the stage's checkpoint; resumes where a stopped run left off.

    `source` is the digest of the file that the rows are of.
    """
    sft, stage = config.sft, config.stage
    progress, _ = await _start(config, context)
    progress = _on(config, progress, digest_of_rows(train, source))
    metrics_log = MetricsLog(
        context.run_dir.path,
        stage=stage,
        after_step=progress.step,
        num_steps=sft.steps,
        print_every=20,
        projects=projects(config.telemetry),
    )
    async with saving(config, context) as saves:
        with metrics_log, stage_active(context.meter, stage):
            while progress.step < sft.steps:
                started_s = time.monotonic()
                step = progress.step + 1
                batch, position = draw(train, sft.batch_size, progress.position, seed=config.seed, stage=stage)
                lr = sft_learning_rate(sft, step)
                update = await context.learner.train_sft(batch, lr)
                if not update.applied:
                    log.info(f"{stage} step {step}: the update is not applied: {update.reason}")
                version = progress.policy_version + update.applied
                progress = replace(progress, step=step, policy_version=version, position=position)
                checkpoint_due = step % config.checkpoint.every_steps == 0 or step == sft.steps
                val_loss = await context.learner.evaluate_sft(validation) if checkpoint_due and validation else None
                seconds = time.monotonic() - started_s
                values = {
                    **update.metrics,
                    "tokens_per_s": update.metrics.get("input_tokens", 0) / seconds,
                    "step_s": seconds,
                    **({} if val_loss is None else {"val_loss": val_loss}),
                }
                row = StepMetrics(stage=stage, step=step, values=values)
                metrics_log.write(row)
                export_step(context.meter, row, context.run_dir.path)
                last = step == sft.steps
                stop = _bad_updates(config, update, step) or _stop_requested(config, context, step, last=last)
                await _save_or_stop(config, saves, progress, stop, last=last)
    return _finished(context.run_dir, stage)


async def _save_or_stop(
    config: RunConfig, saves: Saving, progress: StageProgress, stop: RStarError | None, *, last: bool
) -> None:
    """Take the step's checkpoint where one is due; `stop` ends the run once its checkpoint is whole."""
    saves.refuse_failed()
    if progress.step % config.checkpoint.every_steps == 0 or last or stop:
        await saves.take(progress, finishes=last and not stop)
    if stop:
        await saves.settled()
        raise stop


def _bad_updates(config: RunConfig, update: UpdateResult | None, step: int) -> RStarError | None:
    """After `--optimizer.max-bad-updates` updates in a row that were not finite, the weights are those before these
    updates. The checkpoint's data position is behind their batches, so the same command does not draw them again.
    """
    limit = config.optimizer.max_bad_updates
    if update is None or update.bad_updates < limit:
        return None
    loss = config.algorithm.loss
    own = f", --algorithm.loss {loss}" if ":" in loss else ""
    return NothingLearned(
        f"{config.stage} step {step}: {update.bad_updates} updates in a row were not finite and are not applied "
        f"(--optimizer.max-bad-updates {limit}{own}): {update.reason}. Hint: --optimizer.save-bad-updates FOLDER keeps "
        "their rows; the same command continues with the next batch"
    )


def _empty_steps(config: RunConfig, record: StepRecord, progress: StageProgress) -> RStarError | None:
    if progress.empty_steps < config.max_empty_steps:
        return None
    return NothingLearned(nothing_to_learn(record.metrics, progress.empty_steps, config.algorithm))


def _low_ess(config: RunConfig, metrics: StepMetrics, progress: StageProgress) -> RStarError | None:
    """End the stage where the batches are too far off policy: a few tokens carry the whole update."""
    if progress.low_ess_steps < config.algorithm.max_low_ess_steps:
        return None
    return NothingLearned(
        f"{config.stage} step {metrics.step}: the effective sample size of the tokens was below --algorithm.min-ess "
        f"{config.algorithm.min_ess} in {progress.low_ess_steps} steps in a row (got {metrics['ess_tokens']:.2f}). "
        f"Hint: {'lower --staleness, ' if config.staleness else ''}give --algorithm.min-ess 0, or start in another "
        "--run-dir with a lower --optimizer.learning-rate"
    )


def _stop_requested(config: RunConfig, context: RunContext, step: int, *, last: bool) -> RStarError | None:
    if last or not context.stop_requested():
        return None
    return Stopped(f"stopped after step {step} of {config.stage}, with a checkpoint")


async def run_rl(
    config: RunConfig, problems: Sequence[Problem], context: RunContext, *, heldout: Sequence[Problem] = ()
) -> Checkpoint:
    """GRPO-RoC steps, logged, evaluated and saved around; resumes where a stopped run left off."""
    _log_inactive_format(config, problems)
    _log_staleness(config, context.run_dir)
    progress, before = await _start(config, context)
    checksum = await context.services.publish(progress.policy_version)
    weights = _served_weights(config, context.run_dir, progress, checksum)
    await _load_balancer_state(before, context)
    await _evaluate_if_due(config, progress, heldout, context)
    if config.drop_solved:
        problems = await hard_set(problems, config, context)
    progress = _on(config, progress, digest_of_problems(problems))
    await _balancer_stats(context)  # resets them: earlier events are not part of the first step's row
    cut_ledger(context.run_dir.path, stage=config.stage, after_step=progress.step)
    metrics_log = MetricsLog(
        context.run_dir.path,
        stage=config.stage,
        after_step=progress.step,
        num_steps=config.steps,
        projects=projects(config.telemetry),
    )
    abandoned: Sequence[str] = ()
    async with saving(config, context) as saves, Draws(problems, context.rollouts, config, progress, weights) as draws:
        with metrics_log, stage_active(context.meter, config.stage):
            if progress.step == 0 and config.steps == 0:
                await saves.take(progress, finishes=True)
            ended_s = time.monotonic()
            async for record, reached in train_steps(draws, context, config, progress):
                since_s = time.monotonic() - ended_s  # since the previous step ended
                ended_s, progress = time.monotonic(), reached
                times = {"inter_step_s": max(0.0, since_s - record.metrics["step_s"])}
                if config.staleness:  # engines sample between two steps too
                    times["tokens_per_s"] = record.metrics["tokens_generated"] / since_s
                published = context.services.publish_metrics() if record.checksum is not None else {}
                row = await _with_system(record.metrics.plus({**times, **published}), context)
                metrics_log.write(row)
                export_step(context.meter, row, context.run_dir.path)
                export_ledger(context.meter, record.statuses.values(), config.stage)
                if progress.ended:
                    abandoned = await draws.abandon(progress.step)
                _append_ledger(record, abandoned, config.stage, context.run_dir)
                checksum = checksum if record.checksum is None else record.checksum
                if weights is not None:
                    with best_effort(WEIGHTS):
                        dropped = {one.rollout_id: one.reason for one in record.dropped}
                        weights.note(progress.step, progress.policy_version, checksum, dropped)
                _log_irregularities(record)
                await _record(record, config, context)
                last = progress.step == config.steps or progress.ended != ""
                if progress.ended:
                    log.info(f"{config.stage} ends after step {progress.step}: {progress.ended}")
                stop = (
                    _bad_updates(config, record.update, progress.step)
                    or _low_ess(config, record.metrics, progress)
                    or _empty_steps(config, record, progress)
                    or _stop_requested(config, context, progress.step, last=last)
                )
                await _save_or_stop(config, saves, progress, stop, last=last)
                if not last:
                    await _evaluate_if_due(config, progress, heldout, context)
    context.run_dir.drop_turns(f"{config.stage}-step-*")  # of draws that no step trained
    return _finished(context.run_dir, config.stage)


def _log_staleness(config: RunConfig, run_dir: RunDir) -> None:
    staleness, before = config.staleness, run_dir.configs().get(config.stage, {}).get("staleness", 0)
    if staleness != before:
        log.info(f"{config.stage}: --staleness {staleness} now, {before} when the stage began")
    if staleness >= config.steps > 0:
        steps = config.steps
        log.info(f"{config.stage}: --staleness {staleness} reaches beyond its {steps} steps: all draws begin at once")


def _served_weights(config: RunConfig, run_dir: RunDir, progress: StageProgress, checksum: int) -> WeightsRecord | None:
    """The record of which weights each step left, where rollouts continue under newer ones."""
    weights = WeightsRecord(run_dir.journal_path, config.stage)
    if not config.staleness and not weights.last_step:
        return None
    with best_effort(WEIGHTS):
        weights.note(progress.step, progress.policy_version, checksum, weights.dropped(progress.step))
    return weights


def _log_inactive_format(config: RunConfig, problems: Sequence[Problem]) -> None:
    """Log where resampling has no format to penalise: the penalty then only counts failed calls."""
    if config.algorithm.resample not in ("paper", "release") or not config.algorithm.roc_answer_format:
        return
    without = set[str]()
    for one in problems:
        if environment := one.environment or config.tools.environment:
            without.add(f"environment {environment}")
        elif answer_place(config.reward, one) is None:
            without.add(f"reward {one.reward or config.reward.name}")
    if without:
        log.info(
            f"{config.stage}: --algorithm.roc-answer-format is inactive with {', '.join(sorted(without))}: no marked "
            "answer is read there, so failed tool calls alone decide which correct rollouts are kept"
        )


async def _evaluate_if_due(
    config: RunConfig, progress: StageProgress, heldout: Sequence[Problem], context: RunContext
) -> None:
    """Evaluate before the first step and at intervals; the caller of the stages evaluates at the stage's end."""
    step, every = progress.step, config.evaluate.every_steps
    due = not _start_was_evaluated(config, context.run_dir) if step == 0 else every > 0 and step % every == 0
    if heldout and due and not evaluated(context.run_dir, config.stage, step):
        await run_evaluation(config, {HELD_OUT: heldout}, context, step=step)
        if not config.staleness:  # with one, rollouts of later steps run beside the evaluation
            await _balancer_stats(context)  # resets them: the evaluation is not part of the next step's row


def _start_was_evaluated(config: RunConfig, run_dir: RunDir) -> bool:
    """Whether the first point of a curve exists: the previous stage ended with it."""
    before = None if config.model else previous_checkpoint(run_dir, config.stage)
    return before is not None and evaluated(run_dir, before.stage, before.step)


async def _start(config: RunConfig, context: RunContext) -> tuple[StageProgress, Path | None]:
    """Bring the learner to this stage's state: its own newest checkpoint, or the previous stage's end.

    Returns the folder it was loaded from too; None for another policy, or for no folder.
    """
    newest = await context.run_dir.newest_undamaged_checkpoint(config.stage, config.checkpoint.every_steps)
    forget_evaluations(context.run_dir, config.stage, newest.step if newest else 0)
    if newest is not None:
        progress = StageProgress.read(newest.path)
        last = config.sft.steps if config.stage == "sft" else config.steps
        if (newest.step >= last or progress.ended) and context.run_dir.finished_checkpoint(config.stage) is None:
            context.run_dir.finish_stage(config.stage, newest.step)  # stopped between the two
        # A stage that was stopped for one of these may continue for as many steps.
        if progress.empty_steps >= config.max_empty_steps:
            progress = replace(progress, empty_steps=0)
        if progress.low_ess_steps >= config.algorithm.max_low_ess_steps:
            progress = replace(progress, low_ess_steps=0)
        await context.learner.load_checkpoint(newest.path)
        log.info(f"{config.stage}: resuming after step {newest.step}")
        return progress, newest.path
    before = None if config.model else previous_checkpoint(context.run_dir, config.stage)
    policy_version = 0
    if config.model:
        await context.learner.set_policy(Path(config.model))
    elif before is not None:
        await hashed(partial(refuse_damaged_end, before), before.path)
        await context.learner.load_checkpoint(before.path)
        policy_version = StageProgress.read(before.path).policy_version
    if config.fresh_optimizer:
        await context.learner.reset_optimizer()
    return StageProgress(policy_version=policy_version, position=DataPosition()), before and before.path


async def _load_balancer_state(folder: Path | None, context: RunContext) -> None:
    """The balancer's state at this checkpoint; without it the balancer starts empty."""
    if folder is not None:
        with best_effort(f"{BALANCER_STATE} of {folder.name}"), suppress(FileNotFoundError):
            await context.services.load_balancer_state(read_object(folder / BALANCER_STATE))


def _on(config: RunConfig, progress: StageProgress, data: str) -> StageProgress:
    """Raises `ConfigError` for data other than the stage started with."""
    refuse_other_data(config, progress, data)
    return replace(progress, data=data)


def previous_checkpoint(run_dir: RunDir, stage: str) -> Checkpoint | None:
    """The final checkpoint of the newest finished stage before it, or None."""
    position = STAGES.index(stage) if stage in STAGES else 0
    found = (run_dir.finished_checkpoint(before) for before in reversed(STAGES[:position]))
    return next((checkpoint for checkpoint in found if checkpoint is not None), None)


def _finished(run_dir: RunDir, stage: str) -> Checkpoint:
    checkpoint = run_dir.finished_checkpoint(stage)
    assert checkpoint is not None, f"{stage} ended without its checkpoint"
    return checkpoint


async def _with_system(metrics: StepMetrics, context: RunContext) -> StepMetrics:
    """The step with the balancer's statistics and the memory in use."""
    stats = await _balancer_stats(context)
    for fault in stats.faults if stats else ():
        log.info(f"step {metrics.step}: the balancer's counters are inconsistent: {fault}")
    row = metrics if stats is None else metrics.plus(stats.values, balancer=stats.details)
    with best_effort("the run's memory"):
        memory = {f"memory_bytes/{kind}": held for kind, held in context.services.memory_bytes().items()}
        return row.plus(memory)
    return row


async def _balancer_stats(context: RunContext) -> BalancerStats | None:
    """The balancer's statistics since the last call; None where they cannot be read."""
    with best_effort("the balancer's row"):
        return await context.services.balancer_stats()
    return None


def _append_ledger(record: StepRecord, abandoned: Sequence[str], stage: str, run_dir: RunDir) -> None:
    """The step's row of the ledger, which must not be lost: without it the run ends, and a resume repeats this step.

    The row of a stage's last step has the `abandoned` rollouts of the draws behind it too.
    """
    try:
        append_ledger(
            run_dir.path,
            {**record.statuses, **dict.fromkeys(abandoned, RolloutStatus.ABANDONED)},
            stage=stage,
            step=record.metrics.step,
            reasons={one.rollout_id: one.reason for one in (*record.dropped, *record.left_out)},
            advantages=record.advantages,
        )
    except OSError as failed:
        failed.filename = failed.filename or str(run_dir.path / LEDGER)  # the error of a write does not name its file
        raise


def _log_irregularities(record: StepRecord) -> None:
    if record.metrics["groups_kept"] == 0:
        log.info(f"step {record.metrics.step}: every group has equal rewards; nothing to learn from, weights unchanged")
    elif record.left_out:
        first = record.left_out[0]
        log.info(
            f"step {record.metrics.step}: the learner excluded {len(record.left_out)} rollouts, "
            f"such as {first.rollout_id}: {first.reason}"
        )
    if record.dropped:
        log.info(f"step {record.metrics.step}: {len(record.dropped)} rollouts dropped: {record.dropped[0].reason}")


async def _record(record: StepRecord, config: RunConfig, context: RunContext) -> None:
    every, step = config.checkpoint.trajectories_every_steps, record.metrics.step
    if every and (step - 1) % every == 0:  # after a checkpoint, so that its update can be repeated
        path = context.run_dir.trajectories_path / f"{checkpoint_name(config.stage, step)}.jsonl"
        with best_effort(path.name):
            await context.services.record(record.refs, path, stage=config.stage, step=step, trained=True)
