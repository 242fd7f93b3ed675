"""What a worker has finished, on its way to the driver: summaries in the message, tokens behind object refs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.remote import Batch
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef
from rstar_ray.trajectory import Trajectory, TrajectorySummary

NUM_PARTS = 16
"""Objects that a delivery's trajectories are spread over: a learner rank fetches those with its own rows in them."""

Parts = tuple[list[Trajectory], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The rollouts that ended, in order. The trajectory of the k-th summary lies in part k % `NUM_PARTS`."""

    number: int = 0  # to acknowledge with the next call; until then it is delivered again
    ended: tuple[TrajectorySummary | DroppedRollout, ...] = ()

    @staticmethod
    def of(batch: Batch[Trajectory | DroppedRollout]) -> "tuple[Delivery, Parts]":
        """The message, and the trajectories in `NUM_PARTS` lists; of few trajectories each has its own list."""
        ended = tuple(one.summary if isinstance(one, Trajectory) else one for one in batch.items)
        trajectories = [one for one in batch.items if isinstance(one, Trajectory)]
        return Delivery(number=batch.number, ended=ended), tuple(
            trajectories[part::NUM_PARTS] for part in range(NUM_PARTS)
        )

    def rollouts(self, parts: Sequence[Any]) -> list[FinishedRollout | DroppedRollout]:
        """As the driver holds them; `parts` are the refs of the trajectories' lists."""
        rollouts: list[FinishedRollout | DroppedRollout] = []
        index = 0  # among the trajectories
        for one in self.ended:
            if isinstance(one, DroppedRollout):
                rollouts.append(one)
                continue
            position, part = divmod(index, NUM_PARTS)
            rollouts.append(FinishedRollout(summary=one, ref=TrajectoryRef(parts[part], position)))
            index += 1
        return rollouts
