"""One life cycle for every actor of a run: starting, serving, lost, starting again.

`ServiceActor` is the actor's end, `Service` the driver's. Ray restarts the process of a lost actor; the watchdog
(`actors.health.watchdog`) probes services and kills a process that is silent.
"""

import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayTaskError

from actors.health.heartbeat import Heartbeat, heartbeat, this_process
from actors.remote import Remote, probe_of
from rstar_ray.errors import DeadlineExceeded

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")

LATE_PATIENCE_S = 10.0
"""How long an actor that is late with its first answer may take to answer a probe."""


class ServiceActor:
    """Base of the actors: a name, and the heartbeat that a probe returns.

    Its methods are not coroutines, so that the ranks of the learner stay threaded actors. An async actor runs `probe`
    on its event loop: a blocked loop is silent. `@in_group("probe")` gives `probe` a thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id():  # an actor, not a test of its class
            this_process()

    def __repr__(self) -> str:
        return self._name

    def probe(self) -> Heartbeat:
        """For the watchdog."""
        return heartbeat()

    def close(self) -> Any:
        """Clean up before the process is ended; may be a coroutine."""


class State(StrEnum):
    """A service's state in its life cycle."""

    STARTING = "starting"  # its process may not answer yet
    SERVING = "serving"
    LOST = "lost"  # its process is gone or useless, and the next one has not answered
    RETURNING = "returning"  # the next process answers and is not ready


@dataclass(slots=True)
class LossBudget:
    """How many losses in a row, without progress in between, are tolerated."""

    limit: int
    in_a_row: int = 0
    _progress: object = None

    def count(self, progress: object) -> None:
        """Count a loss. `progress` differs from its value at the loss before if there was progress in between."""
        self.in_a_row = self.in_a_row + 1 if progress == self._progress else 1
        self._progress = progress

    @property
    def exceeded(self) -> bool:
        return self.in_a_row > self.limit

    def reset(self) -> None:
        self.in_a_row = 0


class Service(Remote[A]):
    """An actor of the run as the driver sees it, over all processes that Ray starts for it."""

    def __init__(
        self,
        handle: Any,
        name: str,
        *,
        caller: str = "driver",
        silent_s: float = math.inf,
        start_patience: float = 1.0,
        on_restart: Callable[[], None] | None = None,
        on_death: Callable[[Exception], None] | None = None,
    ) -> None:
        """`silent_s`: how long a probe may stay unanswered before the process is killed; while the service starts
        `start_patience` times that. The watchdog calls `on_restart` when another process answers, and `on_death`
        when Ray starts none any more."""
        super().__init__(handle, name, caller=caller)
        self.silent_s = silent_s
        self.start_patience = start_patience
        self.on_restart = on_restart
        self.on_death = on_death
        self.state = State.STARTING
        self.incarnation = ""  # of the process that was connected
        self._serving_since_s = math.inf  # time.monotonic()

    def starts(self) -> None:
        """Record that a process exists and does not serve yet."""
        self.state = State.STARTING

    def returns(self) -> None:
        """Note that the next process answers, after a loss."""
        self.state = State.RETURNING

    @property
    def is_lost(self) -> bool:
        """Whether it is lost, and not ready again."""
        return self.state in (State.LOST, State.RETURNING)

    def serves(self) -> None:
        """Note that its process works from now on."""
        self.state = State.SERVING
        self._serving_since_s = time.monotonic()

    def lost(self) -> float:
        """Note that its process is gone or unusable. Returns how long it had served [s]."""
        served_s = max(0.0, time.monotonic() - self._serving_since_s)
        self.state, self._serving_since_s = State.LOST, math.inf
        return served_s

    async def connect(self, deadline_s: float, *, retry: bool = True) -> None:
        """Wait for an answer of its process and remember that process. Raises as `call`."""
        found = await self.call(probe_of, deadline_s=deadline_s, reason="its first answer", retry=retry)
        self.incarnation = found.incarnation

    async def same_process(self, patience_s: float) -> bool:
        """Whether the connected process still answers, within this time."""
        found = await self.probe(patience_s)
        return found is not None and found.incarnation == self.incarnation

    async def first_answer(self, ask: Callable[[A], Awaitable[R]], *, deadline_s: float, reason: str) -> R:
        """The result of one method in the first start, in which Ray restarts a process that dies.

        A process that is late and answers no probe may be stopped: it is killed once, and the next has as long.
        """
        try:
            return await self.call(ask, deadline_s=deadline_s, reason=reason, retry=True)
        except DeadlineExceeded as late:
            if isinstance(late, RayTaskError) or await self.probe(LATE_PATIENCE_S) is not None:
                raise
        log.warning("%s did not start, silent for %g s: killed; waiting for the next process", self.name, deadline_s)
        await self.restart()
        return await self.call(ask, deadline_s=deadline_s, reason=reason, retry=True)

    async def close(self, deadline_s: float) -> None:
        """Let it clean up, unless it is lost; `end` follows in any case."""
        if not self.is_lost:
            with contextlib.suppress(Exception):
                await self.call(lambda actor: cast(Any, actor).close(), deadline_s=deadline_s, reason="its end")

    def end(self) -> None:
        """Kill it for good."""
        ray.kill(self.handle)
