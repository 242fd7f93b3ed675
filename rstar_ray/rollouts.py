"""Requests rollouts and collects the results as refs and summaries, without the tokens."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from rstar_ray.algorithm.advantage import Advantage, overlong_penalty, rewards_differ
from rstar_ray.algorithm.rules import advantages, kept_indices
from rstar_ray.config import RunConfig
from rstar_ray.deadline import in_thread, within
from rstar_ray.errors import DeadlineExceeded, RStarError
from rstar_ray.seeds import derive_seed, named_generator
from rstar_ray.trajectory import Problem, RolloutLimits, RolloutRequest, Sampling, StopReason, TrajectorySummary

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrajectoryRef:
    """Reference to a trajectory: position `index` in the list behind `batch` (a Ray ObjectRef, or a fake's list)."""

    batch: Any
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """The driver's record of a finished rollout."""

    summary: TrajectorySummary
    ref: TrajectoryRef

    @property
    def rollout_id(self) -> str:
        return self.summary.rollout_id


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRollout:
    """A rollout that an infrastructure failure ended: recorded with its reason, never scored."""

    rollout_id: str
    group_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One kept trajectory as the learner's ranks receive it."""

    rollout_id: str
    group_id: str  # of its prompt: the siblings that the loss may be normalised over
    ref: TrajectoryRef
    advantage: Advantage
    num_tokens: int  # prompt and response
    num_sampled_tokens: int  # those trained on
    line: int = 0  # of a rollout with several lines of tokens: which of them this row is


class Rollouts(Protocol):
    """Runs rollouts. Several `run`s may be open at once."""

    num_ended: int
    """Rollouts of all runs so far, by which a waiting run sees that others make progress."""

    def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        """Yield every request exactly once, as it finishes."""
        ...

    async def abandon(self) -> None:
        """Stop everything unfinished; no `run` may be waiting for it."""
        ...


FEW = 8
"""Failed rewards, before the first success of a rule, that end the run."""


class UnprovenRewards:
    """Ends a run whose reward fails on its first few rollouts, instead of losing a whole step.

    A rule that has judged one rollout is proven; later failures are dropped, and counted by the step.
    """

    def __init__(self) -> None:
        self._proven: set[str] = set()
        self._failed: Counter[str] = Counter()

    def note(self, rule: str, summary: TrajectorySummary) -> None:
        """One rollout has ended, whose problem names this rule. Raises `RStarError` with the reason of the failures."""
        if rule in self._proven:
            return
        if summary.unjudged:
            self._failed[rule] += 1
            if self._failed[rule] >= FEW:
                failed = f"none of the first {FEW} rollouts could be judged ({summary.unjudged})"
                raise RStarError(
                    f"reward{f' {rule}' if rule else ''}: {failed}. Hint: fix it and run the command again"
                )
        elif summary.stop_reason is StopReason.ANSWERED or summary.reward:  # not the 0 of a rollout that was not judged
            self._proven.add(rule)


Group = list[FinishedRollout]

MOST_REPEATS = 2
"""Largest number of repeats of a rollout that infrastructure failures ended, where its result is needed."""
REPEAT = "/again-"
"""Separates a rollout's id from the number of its repeat."""
_REPEATED = re.compile(rf"{REPEAT}\d+$")


def rollout_requests(
    problems: Sequence[Problem],
    config: RunConfig,
    *,
    name: str | int,
    siblings: int,
    at: str = "",
    evaluation: bool = False,
    oldest_version: int = 0,
    first_position: int = 0,
) -> list[RolloutRequest]:
    """`siblings` requests for each problem under the stage's budgets, or those of `evaluation`.

    `name` is the step or the purpose. Sampling seeds are derived from it and not from `at`, which is only a part of the
    ids: the same draws at one step and at another. Problems are numbered from `first_position`.
    """
    budgets = config.evaluate if evaluation else config.rollout
    draw = name if isinstance(name, int) else 0
    name = f"{'evaluate/' if evaluation else ''}{config.stage}/{name}"
    limits = RolloutLimits(
        max_response_tokens=budgets.max_response_tokens,
        max_turns=budgets.max_turns,
        max_context_tokens=config.engine.max_context_tokens,
        max_calls_per_turn=config.tools.max_calls_per_turn,
        max_environment_turns=config.tools.max_environment_turns,
    )
    sampling = Sampling(temperature=budgets.temperature, top_p=budgets.top_p)
    return [
        RolloutRequest(
            rollout_id=f"{name}{at}/{position}-{problem.id}/{sibling}",
            group_id=f"{name}{at}/{position}-{problem.id}",
            problem=problem,
            seed=derive_seed(config.seed, name, position, problem.id, sibling),
            limits=limits,
            sampling=sampling,
            draw=draw,
            cache_salt=f"{name}{at}" if config.staleness else "",
            oldest_version=oldest_version,
        )
        for position, problem in enumerate(problems, first_position)
        for sibling in range(siblings)
    ]


class RolledOut(NamedTuple):
    """The results of some requests."""

    groups: list[Group]
    dropped: list[DroppedRollout]
    last: str  # id of the rollout that ended last; empty without requests


async def roll_out(requests: Sequence[RolloutRequest], rollouts: Rollouts, *, deadline_s: float) -> RolledOut:
    """Run all requests; all results are in the order of the requests, whatever order they finished in.

    What could not be judged is dropped. Raises `DeadlineExceeded` when no rollout of any run ends for `deadline_s`.
    """
    finished: dict[str, FinishedRollout] = {}
    dropped: dict[str, DroppedRollout] = {}
    last = ""
    async for end in _ends(requests, rollouts, deadline_s=deadline_s):
        last = end.rollout_id
        if (lost := _lost(end)) is not None:
            dropped[lost.rollout_id] = lost
        elif isinstance(end, FinishedRollout):
            finished[end.summary.rollout_id] = end
    groups: dict[str, Group] = {}
    for request in requests:
        if request.rollout_id in finished:
            groups.setdefault(request.group_id, []).append(finished[request.rollout_id])
    in_order = [dropped[request.rollout_id] for request in requests if request.rollout_id in dropped]
    return RolledOut(list(groups.values()), in_order, last)


async def whole_groups(
    requests: Sequence[RolloutRequest], rollouts: Rollouts, *, deadline_s: float
) -> AsyncIterator[Group | DroppedRollout]:
    """Each group when the last of its siblings ends, in the order of the requests.

    What our own failures ended is asked for again, under the same seed and a new id: generation takes no id
    twice. What failed every time comes last, and its group not at all; what ended every time, but could not be judged,
    stands in its group as it is (`summary.unjudged`). Raises as `roll_out`.
    """
    siblings: dict[str, list[str]] = {}
    for request in requests:
        siblings.setdefault(request.group_id, []).append(request.rollout_id)
    finished: dict[str, dict[str, FinishedRollout]] = {group_id: {} for group_id in siblings}
    wanted = list(requests)
    for attempt in range(1, MOST_REPEATS + 2):
        dropped: dict[str, DroppedRollout] = {}
        async for end in _ends(wanted, rollouts, deadline_s=deadline_s):
            if isinstance(end, DroppedRollout) or (attempt <= MOST_REPEATS and end.summary.unjudged):
                lost = _lost(end)
                assert lost is not None
                dropped[_without_repeat(lost.rollout_id)] = lost
                continue
            group_id = end.summary.group_id
            group = finished[group_id]
            group[_without_repeat(end.summary.rollout_id)] = end
            if len(group) == len(siblings[group_id]):
                yield [group[rollout_id] for rollout_id in siblings[group_id]]
                finished[group_id] = {}  # the caller may release it
        if not dropped:
            return
        if attempt > MOST_REPEATS:
            for lost in dropped.values():
                yield lost
            return
        wanted = [
            replace(request, rollout_id=f"{request.rollout_id}{REPEAT}{attempt}")
            for request in requests
            if request.rollout_id in dropped
        ]


def _lost(end: FinishedRollout | DroppedRollout) -> DroppedRollout | None:
    """Whether the result must not count: an infrastructure failure, or an answer that could not be judged."""
    if isinstance(end, DroppedRollout):
        return end
    summary = end.summary
    if not summary.unjudged:
        return None
    return DroppedRollout(rollout_id=summary.rollout_id, group_id=summary.group_id, reason=summary.unjudged)


def _without_repeat(rollout_id: str) -> str:
    """Only at the end: the problem's id in the middle may contain anything."""
    return _REPEATED.sub("", rollout_id)


async def _ends(
    requests: Sequence[RolloutRequest], rollouts: Rollouts, *, deadline_s: float
) -> AsyncIterator[FinishedRollout | DroppedRollout]:
    """The end of every request, once, as it arrives."""
    ended: set[str] = set()
    stream = rollouts.run(requests)

    def unfinished() -> str:
        waiting = [request.rollout_id for request in requests if request.rollout_id not in ended]
        return f"{len(waiting)} of {len(requests)} rollouts unfinished, such as {waiting[0]}"

    while len(ended) < len(requests):
        end = await _next_end(stream, rollouts, deadline_s, unfinished)
        rollout_id = end.rollout_id if isinstance(end, DroppedRollout) else end.summary.rollout_id
        assert rollout_id not in ended, f"{rollout_id} ended twice"
        ended.add(rollout_id)
        yield end


async def _next_end(
    stream: AsyncIterator[FinishedRollout | DroppedRollout],
    rollouts: Rollouts,
    deadline_s: float,
    unfinished: Callable[[], str],
) -> FinishedRollout | DroppedRollout:
    """The deadline restarts while rollouts of other runs end: this one may wait for their memory."""
    coming = asyncio.ensure_future(anext(stream))
    try:
        while True:
            others = rollouts.num_ended
            try:
                return await within(
                    asyncio.shield(coming), deadline_s, waiter="train loop", owner="generation", reason=unfinished
                )
            except DeadlineExceeded:
                if rollouts.num_ended == others:
                    raise
    finally:
        coming.cancel()


async def apply_rules(work: Callable[[], T], config: RunConfig, step: int) -> T:
    """The result of `work`, which resamples groups or computes advantages.

    A user's rule runs in a thread: one that blocks must not block the driver, whose watchdog reports it and ends the
    run after `--detector.still-s`.
    """
    algorithm = config.algorithm
    rules = {"resample": algorithm.resample, "advantage": algorithm.advantage}
    own = [f"--algorithm.{kind} {name}" for kind, name in rules.items() if ":" in name]
    if not own:
        return work()
    return await in_thread(
        work, config.detector.still_s, waiter="train loop", owner=" and ".join(own), reason=f"step {step}"
    )


def resample(group: Group, config: RunConfig, step: int) -> Group:
    """The G siblings to train on; its draw is named by the group, so the order of groups does not matter."""
    rng = named_generator(config.seed, config.stage, "resample", step, group[0].summary.group_id)
    summaries = [rollout.summary for rollout in group]
    return [group[i] for i in kept_indices(summaries, config.algorithm, rng, config.own_folder)]


def has_signal(kept: Group) -> bool:
    """Whether the kept rewards of a group differ, without the penalty of `--algorithm.overlong-buffer`: a division by
    the standard deviation would make the smallest difference of penalties an advantage of full size.
    """
    return rewards_differ([rollout.summary.reward for rollout in kept])


def training_rows(groups: Sequence[Group], config: RunConfig) -> list[TrainingRow]:
    """Each kept trajectory, by its lines, with its advantage in the kept group (Eq. 7), without groups of no signal."""
    rows: list[TrainingRow] = []
    for group in groups:
        if not group or (config.algorithm.reject_equal_reward and not has_signal(group)):
            continue
        summaries = [rollout.summary for rollout in group]
        rewards = [_shaped_reward(summary, config) for summary in summaries]
        found = advantages(rewards, config.algorithm, config.own_folder, summaries)
        for rollout, advantage in zip(group, found, strict=True):
            summary = rollout.summary
            whole = (summary.num_prompt_tokens + summary.num_response_tokens, summary.num_sampled_tokens)
            rows += (
                TrainingRow(
                    rollout_id=summary.rollout_id,
                    group_id=summary.group_id,
                    ref=rollout.ref,
                    advantage=advantage,
                    num_tokens=num_tokens,
                    num_sampled_tokens=num_sampled,
                    line=line,
                )
                for line, (num_tokens, num_sampled) in enumerate(summary.lines or (whole,))
            )
    return rows


def _shaped_reward(summary: TrajectorySummary, config: RunConfig) -> float:
    """What advantages are computed from; resampling and metrics read the reward itself."""
    limit, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer
    return summary.reward + overlong_penalty(summary.num_response_tokens, limit=limit, buffer=buffer)
