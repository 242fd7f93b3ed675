"""What is kept of a step for people to look at: its trajectories as text, and a picture of what the replicas did.

Both come from the workers, where the tokens and the times are. Neither is worth a run: what fails is a shown line.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from actors.generation.actor import GenerationActor
from actors.remote import Remote
from rstar_ray.errors import DeadlineExceeded
from rstar_ray.rollouts import TrajectoryRef
from scheduler.picture import Timeline, draw_step

DEADLINE_S = 120.0


async def record_trajectories(
    workers: Mapping[str, Remote[GenerationActor]],
    refs: Sequence[TrajectoryRef],
    *,
    path: Path,
    seen: Sequence[Any] = (),
    stage: str,
    step: int,
    show: Callable[[str], None],
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
            show(f"{path.name}: {name} could not record it ({_first_line(gone)})")
        except Exception as failed:  # of the writing itself: another worker would meet it too
            show(f"{path.name} was not written: {_first_line(failed)}")
            return
    show(f"{path.name} was not written: no worker is there")


async def draw_timelines(
    workers: Mapping[str, Remote[GenerationActor]],
    path: Path,
    *,
    rollouts: str,
    title: str,
    show: Callable[[str], None],
) -> None:
    """The picture of the rollouts whose ids begin so, as far as their workers are there to tell."""
    try:
        timelines = await _timelines(workers, rollouts, show)
        began_s = min((span.start_s for timeline in timelines for span in timeline.spans), default=None)
        if began_s is None:
            return
        timelines = [timeline.since(began_s) for timeline in timelines]
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_step(
            path,
            [span for timeline in timelines for span in timeline.spans],
            [sample for timeline in timelines for sample in timeline.kv_samples],
            kv_capacity_tokens=max(timeline.kv_capacity_tokens for timeline in timelines),
            title=title,
        )
    except Exception as failed:
        show(f"{path.name} was not drawn: {_first_line(failed)}")


async def _timelines(
    workers: Mapping[str, Remote[GenerationActor]], rollouts: str, show: Callable[[str], None]
) -> list[Timeline]:
    asked = (
        worker.call(lambda w: w.timeline(rollouts), deadline_s=DEADLINE_S, reason="its timeline")
        for worker in workers.values()
    )
    told = await asyncio.gather(*asked, return_exceptions=True)
    timelines: list[Timeline] = []
    for name, timeline in zip(workers, told, strict=True):
        if isinstance(timeline, Timeline):
            timelines.append(timeline)
        elif isinstance(timeline, Exception):
            show(f"the picture lacks {name}: {_first_line(timeline)}")
        else:
            raise timeline  # a cancellation
    return timelines


def _first_line(failed: Exception) -> str:
    lines = str(failed).strip().splitlines()
    return f"{type(failed).__name__}: {lines[0]}" if lines else type(failed).__name__
