"""A stage, begun again from its newest checkpoint whenever the learner was lost in it."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rstar_ray.errors import RankLost, RStarError

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_LOSSES_AT_A_STEP = 3
"""Losses of the learner without a checkpoint in between before the run ends."""


async def repeated(
    stage: Callable[[], Awaitable[T]],
    *,
    restart: Callable[[], Awaitable[None]],
    steps_saved: Callable[[], int],
) -> T:
    """The result of `stage`, which goes on from its newest checkpoint each time it is called.

    `restart` brings the learner back as it was before the first call. Raises `RStarError` where it is lost again and
    again and `steps_saved`, the step of the newest checkpoint, stays the same.
    """
    losses, saved = 0, -1
    while True:
        try:
            if losses:
                await restart()
            return await stage()
        except RankLost as lost:
            before, saved = saved, steps_saved()
            losses = losses + 1 if saved == before else 1
            if losses > MOST_LOSSES_AT_A_STEP:
                raise RStarError(f"{lost}; {losses} times after the checkpoint of step {saved}") from lost
            log.warning(f"{lost}; the learner starts again, from the checkpoint of step {saved}")
