"""Calls from a learner's rank to an engine: a generation actor, found by its name."""

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from actors.remote import Remote
from actors.weights.buckets import BucketPlan
from actors.weights.transfer import EngineSeat, LoadedWeights

if TYPE_CHECKING:
    from actors.generation.generation_actor import GenerationActor

T = TypeVar("T")


class EngineClient:
    """The `EngineLine` of a generation actor of this run; its futures raise Ray's errors."""

    def __init__(self, seat: EngineSeat) -> None:
        self.seat = seat

    def join(self, meeting: Mapping[str, Any]) -> "Future[None]":
        return self._ask(lambda actor: actor.join_sender(meeting))

    def begin(self, version: int, plan: BucketPlan) -> "Future[None]":
        return self._ask(lambda actor: actor.begin_weights(version, plan))

    def take(self, parcel: Mapping[str, Any]) -> "Future[None]":
        return self._ask(lambda actor: actor.take_weights(parcel))

    def end(self) -> "Future[LoadedWeights]":
        return self._ask(lambda actor: actor.end_weights())

    def _ask(self, ask: "Callable[[GenerationActor], Awaitable[T]]") -> "Future[T]":
        try:
            engine = Remote["GenerationActor"].named(self.seat.name, caller="learner")
        except ValueError as gone:  # no actor has this name any longer
            answer: Future[T] = Future()
            answer.set_exception(gone)
            return answer
        return engine.future(ask)
