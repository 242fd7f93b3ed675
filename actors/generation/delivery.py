"""What a worker has finished, on its way to the driver: one record says all but the tokens, which stay behind a ref."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rstar_ray.rollouts import DroppedRollout
from rstar_ray.trajectory import Trajectory, TrajectorySummary

NUM_PARTS = 16
"""Objects that a delivery's trajectories are spread over: a learner rank fetches those with its own rows in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedAt:
    """A finished rollout, and where its trajectory lies in the parts that come with the delivery."""

    summary: TrajectorySummary
    index: int  # among the delivery's trajectories

    @property
    def place(self) -> tuple[int, int]:
        """The part, and the position in it."""
        return self.index % NUM_PARTS, self.index // NUM_PARTS


def in_parts(trajectories: list[Trajectory]) -> tuple[list[Trajectory], ...]:
    """`NUM_PARTS` lists; a delivery of fewer trajectories has each in a list of its own."""
    return tuple(trajectories[part::NUM_PARTS] for part in range(NUM_PARTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What ended since the delivery before; empty when nothing did while the driver's question was open."""

    number: int = 0  # to acknowledge with the next question; until then it is delivered again
    finished: tuple[FinishedAt, ...] = ()
    dropped: tuple[DroppedRollout, ...] = ()


class Deliveries:
    """Gathers what ends until it is asked for; one event loop."""

    def __init__(self, told: Callable[[Trajectory | DroppedRollout], None] = lambda ended: None) -> None:
        """`told` hears of each as it ends."""
        self._told = told
        self._trajectories: list[Trajectory] = []
        self._dropped: list[DroppedRollout] = []
        self._number = 0
        self._unacknowledged: tuple[Delivery, list[Trajectory]] | None = None
        self._fault: BaseException | None = None
        self._something = asyncio.Event()

    def add(self, ended: Trajectory | DroppedRollout) -> None:
        self._told(ended)
        if isinstance(ended, Trajectory):
            self._trajectories.append(ended)
        else:
            self._dropped.append(ended)
        self._something.set()

    def fail(self, fault: BaseException) -> None:
        """Whoever asks from now on gets this."""
        self._fault = fault
        self._something.set()

    async def take(self, wait_s: float, acknowledged: int) -> tuple[Delivery, list[Trajectory]]:
        """Wait up to `wait_s` for the delivery after the one acknowledged, and its trajectories.

        What was not acknowledged is delivered again: its answer may have been lost on the way. Raises the fault of
        `fail`.
        """
        if self._unacknowledged is None or self._unacknowledged[0].number == acknowledged:
            self._unacknowledged = None
            try:
                await asyncio.wait_for(self._something.wait(), wait_s)
            except TimeoutError:
                return Delivery(number=acknowledged), []
        if self._fault is not None:
            raise self._fault
        if self._unacknowledged is not None:  # perhaps of a question that was asked before, and its asker cut off
            return self._unacknowledged
        self._something.clear()
        trajectories, self._trajectories = self._trajectories, []
        dropped, self._dropped = self._dropped, []
        finished = (FinishedAt(summary=one.summary, index=index) for index, one in enumerate(trajectories))
        self._number += 1
        delivery = Delivery(number=self._number, finished=tuple(finished), dropped=tuple(dropped))
        self._unacknowledged = delivery, trajectories
        return self._unacknowledged
