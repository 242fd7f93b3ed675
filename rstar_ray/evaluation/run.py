"""An evaluation from its first rollout to its row in evaluations.jsonl (arXiv:2508.20722 section 5)."""

from collections.abc import Sequence

from rstar_ray.config import RunConfig
from rstar_ray.crew import Crew
from rstar_ray.errors import RStarError
from rstar_ray.evaluation.figures import EvaluationResult, evaluate
from rstar_ray.rollouts import DroppedRollout, Rollouts, TrajectoryRef, roll_out, sibling_requests
from rstar_ray.run_dir.durable import append_row, cut_rows, read_rows
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.stages import STAGES
from rstar_ray.trajectory import Problem, RolloutLimits, RolloutRequest, Sampling, TrajectorySummary

EVALUATION_ROUNDS = 3
"""How often an evaluation asks again for rollouts that our own failures ended."""


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
