"""What a worker has finished, on its way to the driver: one record says all but the tokens, which stay behind a ref."""

import asyncio
from dataclasses import dataclass

from rstar_ray.rollouts import DroppedRollout
from rstar_ray.trajectory import Trajectory, TrajectorySummary


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedAt:
    """A finished rollout, and where its trajectory lies in the list that comes with the delivery."""

    summary: TrajectorySummary
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What ended since the delivery before; empty when nothing did while the driver's question was open."""

    finished: tuple[FinishedAt, ...] = ()
    dropped: tuple[DroppedRollout, ...] = ()


class Deliveries:
    """Gathers what ends until it is asked for; one event loop."""

    def __init__(self) -> None:
        self._trajectories: list[Trajectory] = []
        self._dropped: list[DroppedRollout] = []
        self._fault: BaseException | None = None
        self._something = asyncio.Event()

    def add(self, ended: Trajectory | DroppedRollout) -> None:
        if isinstance(ended, Trajectory):
            self._trajectories.append(ended)
        else:
            self._dropped.append(ended)
        self._something.set()

    def fail(self, fault: BaseException) -> None:
        """Whoever asks from now on gets this."""
        self._fault = fault
        self._something.set()

    async def take(self, wait_s: float) -> tuple[Delivery, list[Trajectory]]:
        """Wait up to `wait_s` for the next delivery and its trajectories; raises the fault of `fail`."""
        try:
            await asyncio.wait_for(self._something.wait(), wait_s)
        except TimeoutError:
            return Delivery(), []
        if self._fault is not None:
            raise self._fault
        self._something.clear()
        trajectories, self._trajectories = self._trajectories, []
        dropped, self._dropped = self._dropped, []
        finished = (FinishedAt(summary=one.summary, index=index) for index, one in enumerate(trajectories))
        return Delivery(finished=tuple(finished), dropped=tuple(dropped)), trajectories
