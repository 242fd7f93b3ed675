"""Asking for rollouts and collecting what becomes of them, by refs and summaries: tokens stay where they are."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rstar_ray.config import RunConfig
from rstar_ray.deadline import within
from rstar_ray.seeds import derive_seed
from rstar_ray.trajectory import Problem, RolloutLimits, RolloutRequest, Sampling, TrajectorySummary


@dataclass(frozen=True, slots=True)
class TrajectoryRef:
    """Where a trajectory lies: position `index` in the list behind `batch` (a Ray ObjectRef, or a fake's list)."""

    batch: Any
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """What the driver is told of a finished rollout."""

    summary: TrajectorySummary
    ref: TrajectoryRef


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRollout:
    """A rollout that our own failures ended: recorded with its reason, never scored."""

    rollout_id: str
    group_id: str
    reason: str


class Rollouts(Protocol):
    """Runs rollouts; yields every request exactly once, as it finishes."""

    def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]: ...


Group = list[FinishedRollout]


def rollout_requests(
    problems: Sequence[Problem], config: RunConfig, *, name: str | int, siblings: int
) -> list[RolloutRequest]:
    """`siblings` rollouts for each problem under the stage's budgets, named by the step or purpose."""
    limits = RolloutLimits(
        max_response_tokens=config.rollout.max_response_tokens,
        max_turns=config.rollout.max_turns,
        max_context_tokens=config.engine.max_context_tokens,
    )
    sampling = Sampling(temperature=config.rollout.temperature, top_p=config.rollout.top_p)
    return sibling_requests(problems, siblings, limits, sampling, seed=config.seed, name=f"{config.stage}/{name}")


def sibling_requests(
    problems: Sequence[Problem], siblings: int, limits: RolloutLimits, sampling: Sampling, *, seed: int, name: str
) -> list[RolloutRequest]:
    """`siblings` requests for each problem, under ids that begin with `name`, each with a sampling seed of its own."""
    return [
        RolloutRequest(
            rollout_id=f"{name}/{position}-{problem.id}/{sibling}",
            group_id=f"{name}/{position}-{problem.id}",
            problem=problem,
            seed=derive_seed(seed, name, position, problem.id, sibling),
            limits=limits,
            sampling=sampling,
        )
        for position, problem in enumerate(problems)
        for sibling in range(siblings)
    ]


async def roll_out(
    requests: Sequence[RolloutRequest], rollouts: Rollouts, *, deadline_s: float
) -> tuple[list[Group], list[DroppedRollout]]:
    """Run all requests; groups in the order of the requests, siblings too, whatever order they finished in.

    Raises `DeadlineExceeded` when none finishes for `deadline_s`.
    """
    finished: dict[str, FinishedRollout] = {}
    dropped: list[DroppedRollout] = []
    stream = rollouts.run(requests)
    while len(finished) + len(dropped) < len(requests):
        waiting = len(requests) - len(finished) - len(dropped)
        reason = f"{waiting} of {len(requests)} rollouts unfinished, such as {_unfinished(requests, finished, dropped)}"
        rollout = await within(anext(stream), deadline_s, waiter="train loop", owner="generation", reason=reason)
        if isinstance(rollout, DroppedRollout):
            dropped.append(rollout)
            continue
        assert rollout.summary.rollout_id not in finished, f"{rollout.summary.rollout_id} finished twice"
        finished[rollout.summary.rollout_id] = rollout
    groups: dict[str, Group] = {}
    for request in requests:
        if request.rollout_id in finished:
            groups.setdefault(request.group_id, []).append(finished[request.rollout_id])
    return list(groups.values()), dropped


def _unfinished(
    requests: Sequence[RolloutRequest], finished: dict[str, FinishedRollout], dropped: list[DroppedRollout]
) -> str:
    gone = {rollout.rollout_id for rollout in dropped}
    return next(r.rollout_id for r in requests if r.rollout_id not in finished and r.rollout_id not in gone)
