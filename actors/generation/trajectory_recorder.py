"""Records a step's trajectories as text. A worker writes them, so that the driver does not need their tokens.

A failure is logged and never ends a run.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from actors.generation.generation_actor import GenerationActor
from actors.remote import Remote
from rstar_ray.errors import DeadlineExceeded, first_line
from rstar_ray.rollouts import TrajectoryRef

log = logging.getLogger(__name__)

DEADLINE_S = 120.0
DEADLINE_PER_TRAJECTORY_S = 0.5
"""Added to the deadline for each trajectory. Long ones (16K tokens) take a tenth of this on an idle CPU core."""
MOST_S = 480.0
"""The longest deadline: the training loop waits, and --detector.still-s is 960 s or more."""


async def record_trajectories(
    workers: Mapping[str, Remote[GenerationActor]],
    refs: Sequence[TrajectoryRef],
    *,
    path: Path,
    seen: Sequence[Any] = (),
    stage: str,
    step: int,
) -> None:
    """Make the first available worker write these trajectories; the next one tries if the worker dies.

    `seen`: refs of the learner ranks' values for tokens (`Learner.seen_tokens`).
    """
    lists, indices = [[ref.batch] for ref in refs], [ref.index for ref in refs]
    boxed = [[ref] for ref in seen]
    for name, worker in workers.items():
        try:
            await worker.call(
                lambda w: w.record(lists, indices, path, stage, step, boxed),
                deadline_s=min(MOST_S, DEADLINE_S + len(refs) * DEADLINE_PER_TRAJECTORY_S),
                reason=f"recording {len(refs)} trajectories",
            )
            return
        except DeadlineExceeded as late:  # the worker may still be writing, and another would take as long
            log.warning(f"{path.name} was not written in time: {first_line(late)}")
            return
        except RayActorError as gone:
            log.warning(f"{path.name}: {name} could not record it ({first_line(gone)})")
        except Exception as failed:  # an error of the write, which another worker would get too
            log.warning(f"{path.name} was not written: {first_line(failed)}")
            return
    log.warning(f"{path.name} was not written: no worker is available")
