"""Asking for rollouts and collecting what becomes of them, by refs and summaries: tokens stay where they are."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

MOST_REPEATS = 2
"""How often a rollout that our own failures ended is asked for again where its answer is needed."""
REPEAT = "/again-"
"""Between a rollout's id and the number of its repeat."""


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

    def unfinished() -> str:
        ended = {*finished, *(rollout.rollout_id for rollout in dropped)}
        waiting = [request.rollout_id for request in requests if request.rollout_id not in ended]
        return f"{len(waiting)} of {len(requests)} rollouts unfinished, such as {waiting[0]}"

    while len(finished) + len(dropped) < len(requests):
        rollout = await within(anext(stream), deadline_s, waiter="train loop", owner="generation", reason=unfinished)
        if isinstance(rollout, DroppedRollout):
            dropped.append(rollout)
            continue
        assert rollout.summary.rollout_id not in finished, f"{rollout.summary.rollout_id} finished twice"
        finished[rollout.summary.rollout_id] = rollout
    return _grouped(requests, finished), dropped


async def roll_out_repeating(
    requests: Sequence[RolloutRequest], rollouts: Rollouts, *, deadline_s: float, repeats: int = MOST_REPEATS
) -> tuple[list[Group], list[DroppedRollout]]:
    """As `roll_out`, but what our own failures ended is asked for again, under the same seed and an id of its own.

    A repeat's id names the attempt, since generation takes no id twice. What is dropped has failed every time.
    """
    finished: dict[str, FinishedRollout] = {}
    dropped: list[DroppedRollout] = []
    wanted = list(requests)
    for attempt in range(1 + repeats):
        groups, dropped = await roll_out(wanted, rollouts, deadline_s=deadline_s)
        finished |= {_without_repeat(rollout.summary.rollout_id): rollout for group in groups for rollout in group}
        if not dropped:
            break
        lost = {_without_repeat(rollout.rollout_id) for rollout in dropped}
        wanted = [
            replace(request, rollout_id=f"{request.rollout_id}{REPEAT}{attempt + 1}")
            for request in requests
            if request.rollout_id in lost
        ]
    return _grouped(requests, finished), dropped


def _without_repeat(rollout_id: str) -> str:
    return rollout_id.partition(REPEAT)[0]


def _grouped(requests: Sequence[RolloutRequest], finished: Mapping[str, FinishedRollout]) -> list[Group]:
    """Finished rollouts in the order of the requests, by group."""
    groups: dict[str, Group] = {}
    for request in requests:
        if request.rollout_id in finished:
            groups.setdefault(request.group_id, []).append(finished[request.rollout_id])
    return list(groups.values())
