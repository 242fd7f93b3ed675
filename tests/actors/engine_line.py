"""A sender's line to an engine of this process, without Ray."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from actors.generation.engine import Engine
from actors.weights.buckets import BucketPlan
from actors.weights.transfer import EngineSeat, LoadedWeights


class Line:
    """An `EngineLine` straight to an engine of this process's loop, as an actor's is through Ray."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.seat = EngineSeat(name=f"generation/{number}", incarnation="1", ranks=1, sender=0)
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def _ask(self, answer: Any) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(answer, self._loop)

    def join(self, meeting: Mapping[str, Any]) -> "Future[None]":
        return self._ask(self._engine.weights.join(meeting))

    def begin(self, version: int, plan: BucketPlan) -> "Future[None]":
        return self._ask(self._engine.weights.begin(version, plan))

    def take(self, parcel: Mapping[str, Any]) -> "Future[None]":
        return self._ask(self._engine.weights.take(parcel))

    def end(self) -> "Future[LoadedWeights]":
        return self._ask(self._engine.weights.end())
