"""An evaluation from its first rollout to its row in evaluations.jsonl (arXiv:2508.20722 section 5)."""

from collections.abc import Sequence

from rstar_ray.config import EvaluationConfig, RunConfig
from rstar_ray.crew import Crew
from rstar_ray.errors import RStarError
from rstar_ray.evaluation.figures import EvaluationResult, evaluate
from rstar_ray.rollouts import MOST_REPEATS, Rollouts, TrajectoryRef, roll_out_repeating, sibling_requests
from rstar_ray.run_dir.decoration import decoration
from rstar_ray.run_dir.durable import append_row, cut_rows, read_rows
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.stages import STAGES
from rstar_ray.trajectory import Problem, RolloutLimits, Sampling, TrajectorySummary


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
    """k rollouts of every problem with the published policy; one row in evaluations.jsonl with what it was asked under.

    `model` names a policy that is not of this run.
    """
    summaries, refs = await _evaluation_rollouts(config, problems, crew.rollouts, name=f"{config.stage}/{problem_set}")
    result = evaluate(problems, summaries, stage=config.stage, step=step, problem_set=problem_set, seed=config.seed)
    if problem_set == "held-out" and config.stage in STAGES:
        cut_rows(run_dir.evaluations_path, stage=config.stage, after_step=step - 1)
    append_row(run_dir.evaluations_path, {**result.as_row(), **protocol(config.evaluate, model)})
    path = run_dir.trajectories_path / f"{config.stage}-{problem_set}.jsonl"
    with decoration(path.name, crew.show):
        await crew.record(refs[: 4 * result.k * 16], path, stage=config.stage, step=step)
    crew.show(
        f"{config.stage} {problem_set}: avg@{result.k} {result.avg_at_k:.3f} "
        f"[{result.ci_low:.3f}, {result.ci_high:.3f}] pass@{result.k} {result.pass_at_k:.3f} "
        f"on {result.num_problems} problems, {result.response_tokens_mean:.0f} tokens"
    )
    return result


def protocol(asked: EvaluationConfig, model: str) -> dict[str, str | float]:
    """What besides the problems decides an evaluation's figures; rows that differ in it are of two evaluations."""
    return {
        "model": model,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "max_response_tokens": asked.max_response_tokens,
        "max_turns": asked.max_turns,
    }


def evaluated(run_dir: RunDir, stage: str, problem_set: str = "held-out") -> bool:
    """Whether the stage's end has its row in evaluations.jsonl."""
    return any(row["stage"] == stage and row["set"] == problem_set for row in read_rows(run_dir.evaluations_path))


async def _evaluation_rollouts(
    config: RunConfig, problems: Sequence[Problem], rollouts: Rollouts, *, name: str
) -> tuple[list[TrajectorySummary], list[TrajectoryRef]]:
    """Every request answered; `RStarError` where one failed every time."""
    limits = RolloutLimits(
        max_response_tokens=config.evaluate.max_response_tokens,
        max_turns=config.evaluate.max_turns,
        max_context_tokens=config.engine.max_context_tokens,
    )
    sampling = Sampling(temperature=config.evaluate.temperature, top_p=config.evaluate.top_p)
    requests = sibling_requests(
        problems, config.evaluate.samples, limits, sampling, seed=config.seed, name=f"evaluate/{name}"
    )
    groups, dropped = await roll_out_repeating(requests, rollouts, deadline_s=config.rollout.deadline_s)
    if dropped:
        raise RStarError(f"evaluation: {len(dropped)} rollouts failed {1 + MOST_REPEATS} times: {dropped[0].reason}")
    finished = [rollout for group in groups for rollout in group]
    return [rollout.summary for rollout in finished], [rollout.ref for rollout in finished]
