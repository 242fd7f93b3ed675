"""An engine as a learner's rank reaches it: the generation actor, by its name."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ray

from actors.weights.buckets import BucketPlan
from actors.weights.transfer import EngineSeat, LoadedWeights


class ActorLine:
    """The `EngineLine` of a generation actor of this run; its answers raise what Ray raises."""

    def __init__(self, seat: EngineSeat) -> None:
        self._seat = seat

    @property
    def seat(self) -> EngineSeat:
        return self._seat

    def join(self, meeting: Mapping[str, Any]) -> "Future[None]":
        return self._ask("join_sender", meeting)

    def begin(self, version: int, plan: BucketPlan) -> "Future[None]":
        return self._ask("begin_weights", version, plan)

    def take(self, parcel: Mapping[str, Any]) -> "Future[None]":
        return self._ask("take_weights", parcel)

    def end(self) -> "Future[LoadedWeights]":
        return self._ask("end_weights")

    def _ask(self, method: str, *arguments: Any) -> "Future[Any]":
        answer: Future[Any] = Future()
        try:
            actor = ray.get_actor(self._seat.name)
        except ValueError as gone:  # no actor has this name any more
            answer.set_exception(gone)
            return answer
        return getattr(actor, method).remote(*arguments).future()
