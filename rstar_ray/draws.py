"""Draws: the prompts of each training step, with their rollouts and seeds. How far ahead of training they begin.

A *draw* is all that one step trains on. With a staleness of k, draws of up to k later steps are rolled out while a step
waits, learns and publishes. docs/async.md has the rule with its proof.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from rstar_ray.config import RunConfig
from rstar_ray.data.order import DataPosition, draw
from rstar_ray.rollouts import DroppedRollout, Group, Rollouts, roll_out, rollout_requests
from rstar_ray.stage_progress import StageProgress
from rstar_ray.trajectory import Problem, RolloutRequest


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
        """The draws that begin now; each is named once."""
        ahead = 0 if self._ended < self._repeats_to else self._staleness
        newest = max(self._begun, min(self._last, self._ended + 1 + ahead))
        begins = range(self._begun + 1, newest + 1)
        self._begun = newest
        return begins

    def end(self, step: int) -> None:
        """This step and all before have ended."""
        self._ended = step

    def oldest(self, number: int) -> int:
        """Ended steps behind the oldest weights that may sample a token of this draw."""
        return max(0, number - 1 - self._staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A finished draw."""

    step: int  # that trains on it
    requests: Sequence[RolloutRequest]
    groups: Sequence[Group]
    dropped: Sequence[DroppedRollout]
    position: DataPosition  # behind its problems
    waited_s: float = 0.0  # that the step waited for it


class Draws:
    """The draws of a stage's remaining steps, one task for each that has begun."""

    def __init__(
        self, problems: Sequence[Problem], rollouts: Rollouts, config: RunConfig, progress: StageProgress
    ) -> None:
        self._problems = problems
        self._rollouts = rollouts
        self._config = config
        self._rule = StalenessRule(0, last=config.steps, ended=progress.step)
        self._position = progress.position
        self._tasks: dict[int, asyncio.Task[Draw]] = {}

    async def take(self, step: int) -> Draw:
        """The draw of this step, once all its rollouts have ended. All steps before have ended, and are not taken
        again. Raises as `roll_out`."""
        started_s = time.monotonic()
        self._rule.end(step - 1)
        for number in self._rule.begin():
            problems, self._position = draw(
                self._problems,
                self._config.prompts_per_step,
                self._position,
                seed=self._config.seed,
                stage=self._config.stage,
            )
            self._tasks[number] = asyncio.create_task(
                finish_draw(problems, self._rollouts, self._config, step=number, position=self._position)
            )
        finished = await self._tasks.pop(step)
        return replace(finished, waited_s=time.monotonic() - started_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop waiting for the draws that were not taken."""
        tasks = [*self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish_draw(
    problems: Sequence[Problem],
    rollouts: Rollouts,
    config: RunConfig,
    *,
    step: int,
    position: DataPosition = DataPosition(),  # noqa: B008  # it is frozen
) -> Draw:
    """Roll out these problems for one step. Raises as `roll_out`."""
    requests = rollout_requests(problems, config, name=step, siblings=config.algorithm.num_rollouts)
    groups, dropped = await roll_out(requests, rollouts, deadline_s=config.rollout.deadline_s)
    return Draw(step=step, requests=requests, groups=groups, dropped=dropped, position=position)
