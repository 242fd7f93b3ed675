"""The stages of the recipe (arXiv:2508.20722 section 4): SFT, then RL in three parts, each evaluated at its end.

Everything that acts is behind Protocols; this module decides what happens in which order, what is logged, what is
saved, and where a stopped run goes on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rstar_ray.algorithm.lr_schedule import LrSchedule
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.config import RunConfig
from rstar_ray.data.order import DataPosition, draw
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.evaluation import EvaluationResult, evaluate
from rstar_ray.run_dir.durable import append_row, cut_rows, read_json, read_rows, write_json
from rstar_ray.run_dir.folder import Checkpoint, RunDir, checkpoint_name
from rstar_ray.run_dir.metrics import MetricsLog, SftMetrics
from rstar_ray.train_loop import (
    DroppedRollout,
    Rollouts,
    StageProgress,
    StepRecord,
    TrainingRow,
    TrainingSystem,
    TrajectoryRef,
    roll_out,
    sibling_requests,
    train_steps,
    unsolved,
)
from rstar_ray.trajectory import Problem, RolloutLimits, RolloutRequest, Sampling, TrajectorySummary

STAGES = ("sft", "stage1", "stage2", "stage3")
EVALUATION_ROUNDS = 3
"""How often an evaluation asks again for rollouts that our own failures ended."""


class Learner(Protocol):
    """The policy's owner: trains it, saves it, brings it back."""

    async def train_sft(self, examples: Sequence[SftExample], lr: float) -> UpdateResult: ...
    async def evaluate_sft(self, examples: Sequence[SftExample]) -> float: ...
    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult: ...
    async def reset_optimizer(self) -> None: ...
    async def load_checkpoint(self, folder: Path) -> None: ...
    async def set_policy(self, folder: Path) -> None: ...
    async def save_checkpoint(self, folder: Path) -> None: ...
    async def export(self, folder: Path) -> None: ...


class Publish(Protocol):
    """Hands the learner's weights to every replica under a version; returns when all serve them."""

    async def __call__(self, policy_version: int) -> None: ...


class RecordTrajectories(Protocol):
    """Writes trajectories in readable form, where their tokens are."""

    async def __call__(self, refs: Sequence[TrajectoryRef], path: Path, *, stage: str, step: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """All that a stage acts through."""

    learner: Learner
    rollouts: Rollouts
    publish: Publish
    record: RecordTrajectories
    show: Callable[[str], None] = print


async def run_sft(
    config: RunConfig, train: Sequence[SftExample], validation: Sequence[SftExample], crew: Crew, run_dir: RunDir
) -> Checkpoint:
    """Supervised steps, then the stage's checkpoint; goes on where a stopped run left off."""
    sft, stage = config.sft, config.stage
    progress = await _start(config, crew, run_dir)
    schedule = LrSchedule(
        learning_rate=sft.learning_rate,
        warmup_steps=round(sft.warmup_share * sft.steps),
        shape=sft.schedule,
        total_steps=sft.steps,
    )
    with MetricsLog(
        run_dir.path, stage=stage, after_step=progress.step, num_steps=sft.steps, print_every=20, show=crew.show
    ) as log:
        while progress.step < sft.steps:
            started_s = time.monotonic()
            step = progress.step + 1
            batch, position = draw(train, sft.batch_size, progress.position, seed=config.seed, stage=stage)
            lr = schedule.at(step - 1)
            update = await crew.learner.train_sft(batch, lr)
            if not update.applied:
                raise RStarError(f"{stage} step {step} was not applied: {update.reason}")
            progress = StageProgress(step=step, policy_version=0, position=position)
            saves = step % config.checkpoint.every_steps == 0 or step == sft.steps
            val_loss = await crew.learner.evaluate_sft(validation) if saves and validation else None
            seconds = time.monotonic() - started_s
            log.write(
                SftMetrics(
                    stage=stage,
                    step=step,
                    loss=update.loss,
                    lr=lr,
                    tokens_per_s=update.input_tokens / seconds,
                    step_s=seconds,
                    val_loss=val_loss,
                )
            )
            if saves:
                await _save(config, progress, crew, run_dir, finishes=step == sft.steps)
    return _finished(run_dir, stage)


async def run_rl(config: RunConfig, problems: Sequence[Problem], crew: Crew, run_dir: RunDir) -> Checkpoint:
    """GRPO-RoC steps, logged and saved around; goes on where a stopped run left off."""
    progress = await _start(config, crew, run_dir)
    await crew.publish(progress.policy_version)
    system = TrainingSystem(rollouts=crew.rollouts, learner=crew.learner, publish=crew.publish)
    if config.drop_solved:
        problems = await _drop_solved(problems, system, config, crew, run_dir)
    if progress.step == 0 and config.steps == 0:
        await _save(config, progress, crew, run_dir, finishes=True)
    with MetricsLog(
        run_dir.path, stage=config.stage, after_step=progress.step, num_steps=config.steps, show=crew.show
    ) as log:
        async for record, reached in train_steps(problems, system, config, progress):
            progress = reached
            log.write(record.metrics)
            _show_odd(record, crew)
            await _record(record, config, crew, run_dir)
            if progress.step % config.checkpoint.every_steps == 0 or progress.step == config.steps:
                await _save(config, progress, crew, run_dir, finishes=progress.step == config.steps)
    return _finished(run_dir, config.stage)


async def run_evaluation(
    config: RunConfig,
    problems: Sequence[Problem],
    crew: Crew,
    run_dir: RunDir,
    *,
    step: int,
    problem_set: str,
    model: str = "",
) -> EvaluationResult:
    """k rollouts of every problem with the published policy; one row in evaluations.jsonl, with the model if named."""
    summaries, refs = await _evaluation_rollouts(config, problems, crew.rollouts, name=f"{config.stage}/{problem_set}")
    result = evaluate(problems, summaries, stage=config.stage, step=step, problem_set=problem_set, seed=config.seed)
    if problem_set == "held-out" and config.stage in STAGES:
        cut_rows(run_dir.evaluations_path, stage=config.stage, after_step=step - 1)
    append_row(run_dir.evaluations_path, {**result.as_row(), **({"model": model} if model else {})})
    path = run_dir.trajectories_path / f"{config.stage}-{problem_set}.jsonl"
    await crew.record(refs[: 4 * result.k * 16], path, stage=config.stage, step=step)
    crew.show(
        f"{config.stage} {problem_set}: avg@{result.k} {result.avg_at_k:.3f} "
        f"[{result.ci_low:.3f}, {result.ci_high:.3f}] pass@{result.k} {result.pass_at_k:.3f} "
        f"on {result.num_problems} problems, {result.response_tokens_mean:.0f} tokens"
    )
    return result


def evaluated(run_dir: RunDir, stage: str, problem_set: str = "held-out") -> bool:
    """Whether the stage's end has its row in evaluations.jsonl."""
    return any(row["stage"] == stage and row["set"] == problem_set for row in read_rows(run_dir.evaluations_path))


async def _evaluation_rollouts(
    config: RunConfig, problems: Sequence[Problem], rollouts: Rollouts, *, name: str
) -> tuple[list[TrajectorySummary], list[TrajectoryRef]]:
    """Every request answered: what our own failures dropped is asked for again, under the same seed."""
    limits = RolloutLimits(
        max_response_tokens=config.evaluate.max_response_tokens,
        max_turns=config.evaluate.max_turns,
        max_context_tokens=config.engine.max_context_tokens,
    )
    sampling = Sampling(temperature=config.evaluate.temperature, top_p=1.0)
    wanted = sibling_requests(
        problems, config.evaluate.samples, limits, sampling, seed=config.seed, name=f"evaluate/{name}"
    )
    summaries: list[TrajectorySummary] = []
    refs: list[TrajectoryRef] = []
    dropped: list[DroppedRollout] = []
    for _ in range(EVALUATION_ROUNDS):
        groups, dropped = await roll_out(wanted, rollouts, deadline_s=config.rollout.deadline_s)
        finished = [rollout for group in groups for rollout in group]
        summaries += [rollout.summary for rollout in finished]
        refs += [rollout.ref for rollout in finished]
        again = {rollout.rollout_id for rollout in dropped}
        wanted: list[RolloutRequest] = [request for request in wanted if request.rollout_id in again]
        if not wanted:
            return summaries, refs
    raise RStarError(f"evaluation: {len(dropped)} rollouts failed {EVALUATION_ROUNDS} times: {dropped[0].reason}")


async def _start(config: RunConfig, crew: Crew, run_dir: RunDir) -> StageProgress:
    """Bring the learner to where this stage stands: its own newest checkpoint, or what the stage before left."""
    newest = run_dir.newest_checkpoint(config.stage)
    if newest is not None:
        last = config.sft.steps if config.stage == "sft" else config.steps
        if newest.step >= last and run_dir.finished_checkpoint(config.stage) is None:
            run_dir.finish_stage(config.stage, newest.step)  # stopped between the two
        await crew.learner.load_checkpoint(newest.path)
        crew.show(f"{config.stage}: going on after step {newest.step}")
        return StageProgress.from_json(read_json(newest.path / "progress.json"))
    before = previous_checkpoint(run_dir, config.stage)
    policy_version = 0
    if config.model:
        await crew.learner.set_policy(Path(config.model))
    elif before is not None:
        await crew.learner.load_checkpoint(before.path)
        policy_version = StageProgress.from_json(read_json(before.path / "progress.json")).policy_version
    if config.reset_optimizer:
        await crew.learner.reset_optimizer()
    return StageProgress(policy_version=policy_version, position=DataPosition())


def previous_checkpoint(run_dir: RunDir, stage: str) -> Checkpoint | None:
    """Where the newest finished stage before it ended; None where there is none."""
    position = STAGES.index(stage) if stage in STAGES else 0
    found = (run_dir.finished_checkpoint(before) for before in reversed(STAGES[:position]))
    return next((checkpoint for checkpoint in found if checkpoint is not None), None)


async def _save(config: RunConfig, progress: StageProgress, crew: Crew, run_dir: RunDir, *, finishes: bool) -> None:
    """A whole checkpoint, or none: learner state, progress, and the policy as a Hugging Face folder."""
    with run_dir.write_checkpoint(config.stage, progress.step, keep_last=config.checkpoint.keep) as folder:
        await crew.learner.save_checkpoint(folder)
        await crew.learner.export(folder / "model")
        write_json(folder / "progress.json", progress.as_json())
    if finishes:
        run_dir.finish_stage(config.stage, progress.step)


def _finished(run_dir: RunDir, stage: str) -> Checkpoint:
    checkpoint = run_dir.finished_checkpoint(stage)
    assert checkpoint is not None, f"{stage} ended without its checkpoint"
    return checkpoint


async def _drop_solved(
    problems: Sequence[Problem], system: TrainingSystem, config: RunConfig, crew: Crew, run_dir: RunDir
) -> Sequence[Problem]:
    """The hard set of stage 3, chosen once by the policy that the stage starts from and kept in the run directory."""
    kept_path = run_dir.path / f"{config.stage}-problems.json"
    if kept_path.exists():
        kept_ids = set(read_json(kept_path))
        return [problem for problem in problems if problem.id in kept_ids]
    looked_at = problems[: config.data.num_filtered] if config.data.num_filtered else problems
    hard = await unsolved(looked_at, system, config)
    crew.show(f"{config.stage}: {len(hard)} of {len(looked_at)} problems are not solved in 8 of 8 rollouts")
    if not hard:
        raise ConfigError("--drop-solved", "the policy solves every problem", "add harder problems, or stop here")
    write_json(kept_path, [problem.id for problem in hard])
    return hard


def _show_odd(record: StepRecord, crew: Crew) -> None:
    if record.metrics.trained_trajectories == 0:
        crew.show(
            f"step {record.metrics.step}: every group has equal rewards; nothing to learn from, weights unchanged"
        )
    if record.dropped:
        crew.show(f"step {record.metrics.step}: {len(record.dropped)} rollouts dropped: {record.dropped[0].reason}")


async def _record(record: StepRecord, config: RunConfig, crew: Crew, run_dir: RunDir) -> None:
    every, step = config.checkpoint.trajectories_every_steps, record.metrics.step
    if every and (step % every == 0 or step == 1):
        path = run_dir.trajectories_path / f"{checkpoint_name(config.stage, step)}.jsonl"
        await crew.record(record.refs, path, stage=config.stage, step=step)
