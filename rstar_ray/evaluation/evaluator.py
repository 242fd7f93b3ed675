"""Evaluations, from the first rollout to the rows in evaluations.jsonl (arXiv:2508.20722 section 5).

All sets of one evaluation are rolled out at once, so that replicas have work until the last problem. Each
problem's row is written when it ends, and an interrupted evaluation resumes from these rows.
"""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rstar_ray.agent.journal import evaluation_folder
from rstar_ray.config import RunConfig
from rstar_ray.context import RunContext
from rstar_ray.errors import RStarError
from rstar_ray.evaluation.figures import EvaluationResult, evaluate
from rstar_ray.evaluation.request_digest import request_digest
from rstar_ray.evaluation.results import ResultLog
from rstar_ray.progress_lines import Progress
from rstar_ray.rollouts import MOST_REPEATS, DroppedRollout, TrajectoryRef, rollout_requests, whole_groups
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import append_row, cut_rows, read_rows
from rstar_ray.run_dir.folder import Checkpoint, RunDir, checkpoint_name
from rstar_ray.trajectory import Problem, RolloutRequest, StopReason

log = logging.getLogger(__name__)

HELD_OUT = "held-out"
"""Name of the set that a run is evaluated on while it trains."""
MOST_UNJUDGED = 0.5
"""Largest share of a set's answers that may stay unjudged; above it the figures would describe the judge, not
the policy.
"""
RECORDED = 64
"""Problems of each set whose trajectories are stored as text."""


async def run_evaluation(
    config: RunConfig,
    sets: Mapping[str, Sequence[Problem]],
    context: RunContext,
    *,
    step: int,
    model: Path | None = None,
) -> list[EvaluationResult]:
    """Roll out every problem of every set k times with the published policy, and write the results into the run
    directory.

    `step` is the stage's; `model` is a folder whose policy is not of this run. Problems that an earlier start
    of the same evaluation finished are not repeated. Raises `RStarError` where a rollout failed on every try.
    """
    asked = request_digest(config, context.plugin_digest, model)
    files = _files(config, sets, context.run_dir, asked, step=step, model=model)
    logs: dict[str, ResultLog] = {}
    requests: list[RolloutRequest] = []
    set_of: dict[str, str] = {}  # by group
    with ExitStack() as open_logs:
        for name, problems in sets.items():
            result_log = logs[name] = open_logs.enter_context(ResultLog(files[name], problems))
            if taken := result_log.taken(f"{config.stage} {name}"):
                log.info(taken)
            wanted = {problem.id for problem in result_log.missing}
            of_set = rollout_requests(
                problems,
                config,
                name=name,
                siblings=config.evaluate.samples,
                at=f"/step-{step}/{asked}",
                evaluation=True,
            )
            missing = [request for request in of_set if request.problem.id in wanted]
            set_of |= {request.group_id: name for request in missing}
            requests += missing
        refs = await _collect(config, requests, set_of, logs, context)
    for name, finished in refs.items():
        if finished:
            path = context.run_dir.trajectories_path / f"{config.stage}-{name}.jsonl"
            with best_effort(path.name):
                await context.services.record(finished, path, stage=config.stage, step=step)
    context.run_dir.drop_turns(evaluation_folder(config.stage))
    return [
        _conclude(config, result_log, context=context, name=name, step=step, model=model)
        for name, result_log in logs.items()
    ]


def result_files(
    config: RunConfig,
    sets: Collection[str],
    run_dir: RunDir,
    plugins: Mapping[str, object],
    *,
    step: int,
    model: Path | None = None,
) -> dict[str, Path]:
    """The file for each set's rows: one file per policy and evaluation settings."""
    return _files(config, sets, run_dir, request_digest(config, plugins, model), step=step, model=model)


def _files(
    config: RunConfig, sets: Collection[str], run_dir: RunDir, asked: str, *, step: int, model: Path | None
) -> dict[str, Path]:
    of = "" if model is not None else f"{checkpoint_name(config.stage, step)}-"
    return {name: run_dir.results_path / f"{of}{name}-{asked}.jsonl" for name in sets}


def protocol(config: RunConfig, model: str = "") -> dict[str, Any]:
    """Everything besides the problems that decides an evaluation's figures; rows that differ in it belong to
    two evaluations.
    """
    asked = config.evaluate
    return {
        "model": model,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "max_response_tokens": asked.max_response_tokens,
        "max_turns": asked.max_turns,
    }


def evaluated(run_dir: RunDir, stage: str, step: int) -> bool:
    """Whether the stage's policy at this step has its row of the held-out problems in evaluations.jsonl."""
    rows = read_rows(run_dir.evaluations_path)
    return any((row["stage"], row["step"], row["set"]) == (stage, step, HELD_OUT) for row in rows)


def heldout_scores(run_dir: RunDir, stage: str) -> dict[int, float]:
    """avg@k on the held-out problems of each evaluated step of a stage; the newest row of a step counts."""
    rows = read_rows(run_dir.evaluations_path)
    return {row["step"]: row["avg_at_k"] for row in rows if (row["stage"], row["set"]) == (stage, HELD_OUT)}


def best_checkpoint(run_dir: RunDir, stage: str) -> Checkpoint | None:
    """The stage's whole checkpoint with the best held-out score, the latest of equal ones; None without a score."""
    scores = heldout_scores(run_dir, stage)
    scored = [checkpoint for checkpoint in run_dir.checkpoints(stage) if checkpoint.step in scores]
    return max(scored, key=lambda checkpoint: (scores[checkpoint.step], checkpoint.step), default=None)


def forget_evaluations(run_dir: RunDir, stage: str, after_step: int) -> None:
    """Drop the evaluations after the step that a run resumes from: their weights do not exist any more."""
    cut_rows(run_dir.evaluations_path, stage=stage, after_step=after_step)
    for path in run_dir.results_path.glob(f"{stage}-step-*"):
        step = re.match(r"(\d{6,})-", path.name.removeprefix(f"{stage}-step-"))  # a user's file may begin alike
        if step is not None and int(step[1]) > after_step:
            path.unlink()


async def _collect(
    config: RunConfig,
    requests: Sequence[RolloutRequest],
    set_of: Mapping[str, str],
    logs: Mapping[str, ResultLog],
    context: RunContext,
) -> dict[str, list[TrajectoryRef]]:
    """Run the requests; rows are written as problems end. Returns the refs of the trajectories to store."""
    wanted = {name: {problem.id for problem in result_log.missing[:RECORDED]} for name, result_log in logs.items()}
    refs: dict[str, list[TrajectoryRef]] = {name: [] for name in logs}
    lost: list[DroppedRollout] = []
    progress = Progress(f"{config.stage} on {', '.join(logs)}", len(set(set_of)))
    correct = ended = 0
    async for group in whole_groups(requests, context.rollouts, deadline_s=config.rollout.deadline_s):
        if isinstance(group, DroppedRollout):
            lost.append(group)
            continue
        name = set_of[group[0].summary.group_id]
        result = logs[name].add([rollout.summary for rollout in group])
        if result.problem_id in wanted[name]:
            refs[name] += [rollout.ref for rollout in group]
        correct, ended = correct + result.num_correct, ended + result.k
        progress.ended(note=f"{correct / ended:.3f} right")
    if lost:
        raise RStarError(
            f"evaluation: {len(lost)} rollouts failed {1 + MOST_REPEATS} times: {lost[0].reason}; "
            "the same command repeats the problems that lack rollouts"
        )
    return refs


def _conclude(
    config: RunConfig, result_log: ResultLog, *, context: RunContext, name: str, step: int, model: Path | None
) -> EvaluationResult:
    """Write the set's figures as a row, and log them."""
    if result_log.missing:
        of = f"{len(result_log.missing)} of {len(result_log.problems)} problems of {name}"
        first = result_log.missing[0].id
        raise RStarError(f"evaluation: {of} have no result, such as {first!r}, though no rollout failed")
    result = evaluate(result_log.results, stage=config.stage, step=step, problem_set=name, seed=config.seed)
    if result.num_unjudged:
        _log_unjudged(result_log, result)
    if refused := sum(StopReason.REFUSED in one.stop_reasons for one in result_log.results):
        log.info(
            f"{config.stage} {name}: {refused} of {result.num_problems} prompts do not fit into a context of "
            f"{config.engine.max_context_tokens} tokens (--engine.max-context-tokens); they count as wrong"
        )
    rows = str(result_log.path.relative_to(context.run_dir.path))
    asked = protocol(config, str(model) if model else "")
    append_row(context.run_dir.evaluations_path, {**result.as_row(), **asked, "problems": rows})
    context.meter.set("rstar_evaluation_pass_ratio", result["avg_at_k"], stage=config.stage, set=name)
    k = result.k
    majority = "" if result["maj_at_k"] is None else f"maj@{k} {result['maj_at_k']:.3f} "
    loosely = "" if result["loose_avg_at_k"] is None else f"loosely {result['loose_avg_at_k']:.3f} "
    low, high = result.intervals["avg_at_k"]
    log.info(
        f"{config.stage} {name}: avg@{k} {result['avg_at_k']:.3f} [{low:.3f}, {high:.3f}] {loosely}"
        f"pass@{k} {result['pass_at_k']:.3f} {majority}on {result.num_problems} problems, "
        f"{result['response_tokens_mean']:.0f} tokens; a row per problem in {rows}"
    )
    return result


def _log_unjudged(result_log: ResultLog, result: EvaluationResult) -> None:
    """Log unjudged answers with an example; raise `RStarError` where they are most of a set."""
    first = next(one for one in result_log.results if any(one.unjudged))
    reason = next(filter(None, first.unjudged))
    of = f"{result.num_unjudged} of {result.num_problems * result.k} answers"
    said = f"{of} of {result.problem_set} could not be judged, such as of problem {first.problem_id!r}: {reason}"
    if result.num_unjudged > MOST_UNJUDGED * result.num_problems * result.k:
        raise RStarError(f"evaluation: {said}. Hint: fix the reward, delete {result_log.path}, and evaluate again")
    log.info(f"{said}; they count as not right")
