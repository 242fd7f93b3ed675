"""Draws: the prompts of each training step, with their rollouts and seeds. How far ahead of training they begin.

A *draw* is all that one step trains on. With a staleness of k, draws of up to k later steps are rolled out while a step
waits, learns and publishes. docs/async.md has the rule with its proof.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from rstar_ray.config import RunConfig
from rstar_ray.data.order import DataPosition, draw, draw_mix, mix_counts, present
from rstar_ray.errors import ConfigError
from rstar_ray.rollouts import (
    DroppedRollout,
    Group,
    Rollouts,
    apply_rules,
    has_signal,
    resample,
    roll_out,
    rollout_requests,
)
from rstar_ray.run_dir.metrics import is_correct
from rstar_ray.run_dir.served_weights import WeightsRecord
from rstar_ray.seeds import named_generator
from rstar_ray.stage_progress import StageProgress
from rstar_ray.trajectory import Problem, RolloutRequest

log = logging.getLogger(__name__)


class StalenessRule:
    """Draw d begins once d - 1 - k steps have ended, and step d trains on draw d alone.

    A step has ended when every replica serves its weights, or when its update was refused. The newest published weights
    alone serve, so no token is more than k steps older than the weights that its step updates. k = 0 is synchronous.
    """

    def __init__(self, staleness: int, *, last: int, ended: int = 0, repeats_to: int = 0) -> None:
        """`last`: the stage's last step. `ended`: its steps that have ended. Up to step `repeats_to` a resumed run
        repeats steps from recorded rollouts: each draw then waits for the weights that sampled it to be back."""
        self._staleness = staleness
        self._last = last
        self._ended = ended
        self._repeats_to = repeats_to
        self._begun = ended

    def begin(self) -> range:
        """The draws that begin now; each is returned once."""
        ahead = 0 if self._ended < self._repeats_to else self._staleness
        newest = max(self._begun, min(self._last, self._ended + 1 + ahead))
        begins = range(self._begun + 1, newest + 1)
        self._begun = newest
        return begins

    def end(self, step: int) -> None:
        """Record that this step and all earlier steps have ended."""
        self._ended = step

    def repeat_at_most_to(self, step: int) -> None:
        """Steps after this one are not repeated: a repeated step has left other weights."""
        self._repeats_to = min(self._repeats_to, step)

    def oldest(self, number: int) -> int:
        """Number of ended steps of the oldest weights that may sample a token of this draw."""
        return max(0, number - 1 - self._staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A finished draw."""

    step: int  # that trains on it
    requests: Sequence[RolloutRequest]
    groups: Sequence[Group]
    dropped: Sequence[DroppedRollout]
    last: str  # id of the rollout that ended last
    position: DataPosition  # behind its problems
    waited_s: float = 0.0  # that the step waited for it


class Draws:
    """The draws of a stage's remaining steps, one task for each that has begun."""

    def __init__(
        self,
        problems: Sequence[Problem],
        rollouts: Rollouts,
        config: RunConfig,
        progress: StageProgress,
        weights: WeightsRecord | None = None,
    ) -> None:
        """`weights`: those of the stage's steps on record, where rollouts continue under newer weights."""
        self._problems = problems
        self._mix = present(config.data.weights, problems)
        if config.data.weights and not self._mix:
            named = ", ".join(sorted(config.data.weights))
            raise ConfigError("--data.mix", f"no problem of {named} is left to {config.stage}", "name other sources")
        if gone := config.data.weights.keys() - self._mix.keys():
            log.info(
                f"{config.stage}: --data.mix: no problem of {', '.join(sorted(gone))} is left; the others are drawn"
            )
        self._rollouts = rollouts
        self._config = config
        self._weights = weights
        self._rule = StalenessRule(
            config.staleness,
            last=config.steps,
            ended=progress.step,
            repeats_to=weights.last_step if weights is not None else 0,
        )
        self._position = progress.position
        self._visits = {step: (solved, others) for step, solved, others in progress.position.visits}
        self._requests: dict[int, list[RolloutRequest]] = {}  # of the draws that have begun and are not taken
        self._tasks: dict[int, asyncio.Task[Draw]] = {}

    async def take(self, step: int) -> Draw:
        """The draw of this step, once all its rollouts have ended.

        All earlier steps have ended; no draw is taken twice. Raises as `roll_out`.
        """
        started_s = time.monotonic()
        self._rule.end(step - 1)
        if self._weights is not None:
            self._rule.repeat_at_most_to(self._weights.last_step)
        for number in self._rule.begin():
            self._begin(number, ended=step - 1)
        finished = await self._tasks[step]
        del self._tasks[step], self._requests[step]
        position = replace(finished.position, visits=self._note_visits(finished))
        return replace(finished, position=position, waited_s=time.monotonic() - started_s)

    def _begin(self, number: int, *, ended: int) -> None:
        requests, others = self._next_requests(number, ended=ended)
        finishing = finish_draw(
            requests,
            self._rollouts,
            self._config,
            step=number,
            problems=others,
            position=self._position,
            lost=self._weights.dropped(number) if self._weights is not None else {},
        )
        self._tasks[number] = asyncio.create_task(finishing)

    def _next_requests(self, number: int, *, ended: int) -> tuple[list[RolloutRequest], list[Problem]]:
        """The next draw's rollouts, and the problems from which it may be refilled."""
        config = self._config
        named: dict[str, Any] = {"seed": config.seed, "stage": config.stage}
        if self._mix:
            rng = named_generator(config.seed, config.stage, "mix", number)
            counts = mix_counts(self._mix, config.prompts_per_step, rng, floor=config.data.mix_floor)
            skipped = self._skipped(number, counts)
            problems, self._position = draw_mix(self._problems, counts, self._position, skipped=skipped, **named)
        else:
            skipped = self._skipped(number, {"": config.prompts_per_step})
            problems, self._position = draw(
                self._problems, config.prompts_per_step, self._position, skipped=skipped, **named
            )
        requests = self._requests[number] = rollout_requests(
            problems,
            config,
            name=number,
            siblings=config.algorithm.num_rollouts,
            oldest_version=self._oldest_version(number, ended=ended),
        )
        others = [
            problem
            for index, problem in enumerate(self._problems)
            if index not in skipped and (not self._mix or problem.family in self._mix)
        ]
        return requests, others

    def _note_visits(self, draw: Draw) -> tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...]:
        """The visits that `--data.skip-solved` reads, of the latest steps and this one: see `DataPosition.visits`."""
        data = self._config.data
        if not data.skip_solved:
            return ()
        right = Counter(
            rollout.summary.group_id for group in draw.groups for rollout in group if is_correct(rollout.summary)
        )
        problems = {request.group_id: request.problem.id for request in draw.requests}
        siblings = self._config.algorithm.num_rollouts
        others = dict.fromkeys(name for group, name in problems.items() if right[group] < siblings)
        solved = dict.fromkeys(name for name in problems.values() if name not in others)
        self._visits[draw.step] = (tuple(solved), tuple(others))
        oldest = draw.step - data.skip_solved - self._config.staleness
        self._visits = {step: visits for step, visits in self._visits.items() if step > oldest}
        return tuple((step, *visits) for step, visits in self._visits.items())

    def _skipped(self, number: int, counts: Mapping[str, int]) -> frozenset[int]:
        """Indices of the problems that this draw excludes, by the steps that must have ended before it begins.

        `counts`: how many problems it takes of each source, or of all ("").
        """
        data, newest = self._config.data, self._rule.oldest(number)
        last: dict[str, bool] = {}  # by problem, latest first: whether its last visit solved it
        for step in range(newest, newest - data.skip_solved, -1):
            for names, solved in zip(self._visits.get(step, ()), (True, False), strict=False):
                for name in names:
                    last.setdefault(name, solved)
        names = [name for name, solved in last.items() if solved]
        skipped: list[int] = []
        for source, count in counts.items() if names else ():
            indices = {
                problem.id: index for index, problem in enumerate(self._problems) if source in ("", problem.family)
            }
            most = min(int(data.max_skipped * len(indices)), max(0, len(indices) - count))
            skipped += [indices[name] for name in names if name in indices][:most]
        return frozenset(skipped)

    def _oldest_version(self, number: int, *, ended: int) -> int:
        """The oldest policy version that may have sampled a turn of this draw; the newest where older weights
        are not on record.
        """
        if self._weights is None:
            return 0
        found = self._weights.version(self._rule.oldest(number))
        return found if found is not None else self._weights.version(ended) or 0

    async def abandon(self, step: int) -> list[str]:
        """Stop the rollouts of draws after this step, the stage's last, and return their ids.

        Draws that began before a kill are among them. Of one that the resumed run has not begun, the ids of refills are
        not known.
        """
        for number in range(step + 1, min(self._config.steps, step + self._config.staleness) + 1):
            if number not in self._requests:
                self._next_requests(number, ended=step)
        abandoned = [request.rollout_id for requests in self._requests.values() for request in requests]
        running = bool(self._tasks)
        await self.close()
        if running:
            await self._rollouts.abandon()
        return abandoned

    async def close(self) -> None:
        """Stop waiting for the draws that were not taken."""
        tasks = [*self._tasks.values()]
        self._tasks.clear()
        self._requests.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


async def finish_draw(
    requests: list[RolloutRequest],
    rollouts: Rollouts,
    config: RunConfig,
    *,
    step: int,
    problems: Sequence[Problem] = (),
    position: DataPosition = DataPosition(),  # noqa: B008  # it is frozen
    lost: Mapping[str, str] = MappingProxyType({}),
) -> Draw:
    """Run the rollouts of one step, and those of `--algorithm.refill-rounds`, which are added to `requests`.

    `problems`: those of the stage, from which it is refilled. `lost`: reasons by id of rollouts that were dropped when
    the step was trained before a kill; they are not run again. Raises as `roll_out`.
    """
    asked, groups, dropped, last = requests, list[Group](), list[DroppedRollout](), ""
    for refill in range(config.algorithm.refill_rounds + 1):
        if refill:
            refilled = partial(_refill, requests, groups, problems, config, step=step, refill=refill)
            asked = await apply_rules(refilled, config, step)
            requests += asked
        if not asked:
            break
        to_run = [request for request in asked if request.rollout_id not in lost]
        done = await roll_out(to_run, rollouts, deadline_s=config.rollout.deadline_s)
        groups += done.groups
        dropped += done.dropped
        dropped += [
            DroppedRollout(rollout_id=request.rollout_id, group_id=request.group_id, reason=lost[request.rollout_id])
            for request in asked
            if request.rollout_id in lost
        ]
        last = done.last or last
    return Draw(step=step, requests=requests, groups=groups, dropped=dropped, last=last, position=position)


def _refill(
    requests: Sequence[RolloutRequest],
    groups: Sequence[Group],
    problems: Sequence[Problem],
    config: RunConfig,
    *,
    step: int,
    refill: int,
) -> list[RolloutRequest]:
    """A new problem for each one without a signal (dynamic sampling, DAPO, arXiv:2503.14476 section 3.2).

    They are drawn by (seed, stage, step, round) from all that this step does not have yet. Unlike in DAPO, their number
    depends on the rewards alone and not on which rollouts finish first.
    """
    num_with_signal = sum(has_signal(resample(group, config, step)) for group in groups)
    there = {request.problem.id for request in requests}
    others = [problem for problem in problems if problem.id not in there]
    rng = named_generator(config.seed, config.stage, "refill", step, refill)
    ordered, count = (
        [others[int(i)] for i in rng.permutation(len(others))],
        max(0, config.prompts_per_step - num_with_signal),
    )
    if mix := present(config.data.weights, ordered):
        counts = mix_counts(mix, count, rng)
        by_source = {name: [problem for problem in ordered if problem.family == name] for name in counts}
        ordered = [one for name, n in counts.items() for one in by_source[name][:n]]
        ordered += [one for name, n in counts.items() for one in by_source[name][n:]]  # where a source has too few
    return rollout_requests(
        ordered[:count],
        config,
        name=step,
        siblings=config.algorithm.num_rollouts,
        oldest_version=requests[0].oldest_version,
        first_position=len({request.group_id for request in requests}),
    )
