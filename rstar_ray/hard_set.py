"""The hard set of stage 3: problems that the latest policy does not always solve (arXiv:2508.20722 section 4.3)."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rstar_ray.config import RunConfig
from rstar_ray.crew import Crew
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.progress import Progress
from rstar_ray.rollouts import MOST_REPEATS, DroppedRollout, rollout_requests, whole_groups
from rstar_ray.run_dir.durable import read_json, write_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.metrics import is_correct
from rstar_ray.train_loop import TrainingSystem
from rstar_ray.trajectory import Problem

MOST_LOST = 0.05
"""Share of its rollouts that the choice may lack."""


async def unsolved(
    problems: Sequence[Problem],
    system: TrainingSystem,
    config: RunConfig,
    *,
    siblings: int = 8,
    show: Callable[[str], None] = print,
) -> list[Problem]:
    """Problems the latest policy does not solve in all of 8 rollouts (arXiv:2508.20722 section 4.3).

    Rollouts that our own failures end are repeated. A problem that still lacks one is not known to be solved, and
    stays; with more than a small share of them the choice would be ours and not the policy's: `RStarError`.
    """
    requests = rollout_requests(problems, config, name="filter", siblings=siblings)
    solved: set[str] = set()
    dropped: list[DroppedRollout] = []
    progress = Progress(f"{config.stage}: choosing the hard set", len(problems), show)
    async for group in whole_groups(requests, system.rollouts, deadline_s=config.rollout.deadline_s):
        if isinstance(group, DroppedRollout):
            dropped.append(group)
            continue
        if all(is_correct(rollout.summary) for rollout in group):
            solved.add(group[0].summary.problem_id)
        progress.ended(note=f"{len(solved)} always solved")
    if len(dropped) > MOST_LOST * len(requests):
        raise RStarError(
            f"choosing the hard set: {len(dropped)} of {len(requests)} rollouts failed {1 + MOST_REPEATS} times: "
            f"{dropped[0].reason}"
        )
    return [problem for problem in problems if problem.id not in solved]


async def hard_set(
    problems: Sequence[Problem], system: TrainingSystem, config: RunConfig, crew: Crew, run_dir: RunDir
) -> Sequence[Problem]:
    """The hard set of stage 3, chosen once by the policy that the stage starts from and kept in the run directory."""
    if (kept := kept_hard_set(problems, config, run_dir)) is not None:
        return kept
    looked_at = problems[: config.data.num_filtered] if config.data.num_filtered else problems
    hard = await unsolved(looked_at, system, config, show=crew.show)
    crew.show(f"{config.stage}: {len(hard)} of {len(looked_at)} problems are not solved in 8 of 8 rollouts")
    if not hard:
        raise ConfigError("--drop-solved", "the policy solves every problem", "add harder problems, or stop here")
    write_json(_kept_path(config, run_dir), [problem.id for problem in hard])
    return hard


def kept_hard_set(problems: Sequence[Problem], config: RunConfig, run_dir: RunDir) -> list[Problem] | None:
    """Those of an earlier start's choice; None where there is none."""
    path = _kept_path(config, run_dir)
    if not path.exists():
        return None
    kept_ids = set(read_json(path))
    return [problem for problem in problems if problem.id in kept_ids]


def _kept_path(config: RunConfig, run_dir: RunDir) -> Path:
    return run_dir.path / f"{config.stage}-problems.json"
