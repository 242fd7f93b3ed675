"""The hard set of stage 3: problems that the latest policy does not always solve (arXiv:2508.20722 section
4.3).

Each problem's row is written when its last rollout ends, and an interrupted choice resumes from these rows.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from rstar_ray.agent.journal import choice_folder
from rstar_ray.config import RunConfig
from rstar_ray.context import RunContext
from rstar_ray.data.problems import random_subset
from rstar_ray.errors import ConfigError, RStarError, Stopped
from rstar_ray.evaluation.request_digest import request_digest
from rstar_ray.evaluation.results import ProblemResult, ResultLog
from rstar_ray.progress_lines import Progress
from rstar_ray.rollouts import MOST_REPEATS, DroppedRollout, rollout_requests, whole_groups
from rstar_ray.run_dir.durable import read_json, write_json
from rstar_ray.run_dir.folder import RunDir, stage_ends
from rstar_ray.run_dir.manifest import MANIFEST, checksum
from rstar_ray.trajectory import Problem

log = logging.getLogger(__name__)

SIBLINGS = 8
"""Rollouts per problem."""
MOST_LOST = 0.05
"""Largest share of rollouts that may be missing."""


async def unsolved(result_log: ResultLog, config: RunConfig, context: RunContext, *, choice: str) -> list[Problem]:
    """The log's problems that the latest policy does not solve in all of 8 rollouts (arXiv:2508.20722 section 4.3).

    Problems with results in the log are not rolled out again. `choice` distinguishes this selection from those with
    another policy or other settings. Rollouts that infrastructure failures end are repeated. A problem that still lacks
    a rollout counts as not solved. Raises `RStarError` if more than a small share of rollouts is missing: failures
    would then determine the selection.
    """
    missing = {problem.id for problem in result_log.missing}
    asked = rollout_requests(result_log.problems, config, name="filter", siblings=SIBLINGS, at=f"/{choice}")
    requests = [request for request in asked if request.problem.id in missing]
    dropped: list[DroppedRollout] = []
    num_solved = sum(map(_always_solved, result_log.results))
    what = f"{config.stage}: choosing the hard set"
    progress = Progress(what, len(result_log.problems), done=len(result_log.results))
    async for group in whole_groups(requests, context.rollouts, deadline_s=config.rollout.deadline_s):
        if isinstance(group, DroppedRollout):
            dropped.append(group)
            continue
        num_solved += _always_solved(result_log.add([rollout.summary for rollout in group]))
        progress.ended(note=f"{num_solved} always solved")
        if context.stop_requested():  # all results so far are in the log
            known = f"{len(result_log.results)} of {len(result_log.problems)} problems in"
            raise Stopped(f"stopped while choosing the hard set, {known}")
    if len(dropped) > MOST_LOST * len(asked):
        raise RStarError(
            f"choosing the hard set: {len(dropped)} of {len(asked)} rollouts failed {1 + MOST_REPEATS} times: "
            f"{dropped[0].reason}; the same command repeats the problems that lack some"
        )
    solved = {result.problem_id for result in result_log.results if _always_solved(result)}
    return [problem for problem in result_log.problems if problem.id not in solved]


def _always_solved(result: ProblemResult) -> bool:
    return result.num_correct == result.k


async def hard_set(problems: Sequence[Problem], config: RunConfig, context: RunContext) -> Sequence[Problem]:
    """The hard set of stage 3, chosen once by the stage's initial policy and kept in the run directory.

    The rows that the choice is based on are stored with those of evaluations.
    """
    if (kept := stored_hard_set(problems, config, context.run_dir)) is not None:
        context.run_dir.drop_turns(choice_folder(config.stage))
        return kept
    candidates = _candidates(problems, config)
    choice = _choice(config, context)
    with ResultLog(context.run_dir.results_path / f"{config.stage}-filter-{choice}.jsonl", candidates) as result_log:
        if taken := result_log.taken(f"{config.stage}: choosing the hard set"):
            log.info(taken)
        hard = await unsolved(result_log, config, context, choice=choice)
    log.info(f"{config.stage}: {len(hard)} of {len(candidates)} problems are not solved in 8 of 8 rollouts")
    if not hard:
        raise ConfigError("--drop-solved", "the policy solves every problem", "add harder problems, or stop here")
    write_json(_hard_set_path(config, context.run_dir), [problem.id for problem in hard])
    context.run_dir.drop_turns(choice_folder(config.stage))
    return hard


def _candidates(problems: Sequence[Problem], config: RunConfig) -> Sequence[Problem]:
    """The `--data.num-filtered` problems that are rolled out, the same on every start and in every stage."""
    count, sources = config.data.num_filtered, config.data.weights
    problems = [problem for problem in problems if not sources or problem.family in sources]
    if not config.data.train:  # generated in random order, with the families in turn
        return problems[: count or None]
    return random_subset(problems, count, seed=config.seed, name="num_filtered")


def stored_hard_set(problems: Sequence[Problem], config: RunConfig, run_dir: RunDir) -> list[Problem] | None:
    """The hard set of an earlier start, or None."""
    path = _hard_set_path(config, run_dir)
    if not path.exists():
        return None
    hard_ids = set(read_json(path))
    return [problem for problem in problems if problem.id in hard_ids]


def _hard_set_path(config: RunConfig, run_dir: RunDir) -> Path:
    return run_dir.path / f"{config.stage}-problems.json"


def _choice(config: RunConfig, context: RunContext) -> str:
    """A digest of one choice: the policy, and the settings of its rollouts."""
    newest = context.run_dir.newest_checkpoint(config.stage)
    model = Path(config.model) if config.model and newest is None else None
    left_by = {config.stage: newest.path} if newest is not None else stage_ends(context.run_dir)
    policy = {stage: _contents(folder) for stage, folder in left_by.items()}
    return request_digest(config, {**context.plugin_digest, "siblings": SIBLINGS, "policy": policy}, model)


def _contents(checkpoint: Path) -> str:
    """One checksum over all files; empty for a checkpoint that the user deleted because later stages do not need it."""
    manifest = checkpoint / MANIFEST
    return checksum(manifest) if manifest.exists() else ""
