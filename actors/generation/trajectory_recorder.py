"""The recorded trajectories of a step, as text. A worker writes them, because the tokens are there.

A failure is logged and never ends a run.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from actors.generation.generation_actor import GenerationActor
from actors.remote import Remote
from rstar_ray.errors import DeadlineExceeded
from rstar_ray.rollouts import TrajectoryRef

log = logging.getLogger(__name__)

DEADLINE_S = 120.0


async def record_trajectories(
    workers: Mapping[str, Remote[GenerationActor]],
    refs: Sequence[TrajectoryRef],
    *,
    path: Path,
    seen: Sequence[Any] = (),
    stage: str,
    step: int,
) -> None:
    """Have the first worker that is there write these trajectories: the driver never holds their tokens.

    `seen`: refs of what the learner's ranks saw of the tokens (`Learner.seen_tokens`).
    """
    lists, indices = [[ref.batch] for ref in refs], [ref.index for ref in refs]
    boxed = [[ref] for ref in seen]
    for name, worker in workers.items():
        try:
            await worker.call(
                lambda w: w.record(lists, indices, path, stage, step, boxed),
                deadline_s=DEADLINE_S,
                reason=f"recording {len(refs)} trajectories",
            )
            return
        except (RayActorError, DeadlineExceeded) as gone:
            log.warning(f"{path.name}: {name} could not record it ({_first_line(gone)})")
        except Exception as failed:  # of the writing itself: another worker would meet it too
            log.warning(f"{path.name} was not written: {_first_line(failed)}")
            return
    log.warning(f"{path.name} was not written: no worker is there")


def _first_line(failed: Exception) -> str:
    lines = str(failed).strip().splitlines()
    return f"{type(failed).__name__}: {lines[0]}" if lines else type(failed).__name__
