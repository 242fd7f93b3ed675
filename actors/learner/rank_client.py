"""Calls to the learner's ranks: each runs once, and the error type tells whether a restart may succeed.

After a short connection failure, the rank may or may not have received the call. The call is repeated under the same
number, and a rank that has a result for that number returns it again.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from actors.learner.learner_actor import LearnerActor, rank_name
from actors.remote import probe_of
from actors.service import Service
from rstar_ray.config import RunConfig
from rstar_ray.deadline import within
from rstar_ray.errors import ConfigError, DeadlineExceeded, LearnerError, RankLost, last_line

log = logging.getLogger(__name__)

BLIP_PATIENCE_S = 10.0
"""How long an unreachable rank may take to answer again before it counts as lost."""

R = TypeVar("R")


class RankDied(RankLost):
    """The rank's process has ended; connection errors of other ranks are consequences."""


class _NumberedMethods:
    """Proxy of a rank's methods: calls them through `LearnerActor.call` under one number."""

    def __init__(self, rank: "Rank", number: int) -> None:
        self._rank = rank
        self._number = number

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        named = self._rank.handle.call.options(name=f"{self._rank.name} {method}")
        return lambda *arguments: named.remote(self._number, method, arguments)


class Rank(Service[LearnerActor]):
    """One rank of the learner; Ray does not restart it."""

    _numbers = itertools.count(1)

    async def first_heartbeat(self, deadline_s: float) -> None:
        """Wait for the rank's first answer and record its incarnation.

        Raises `RankDied` at the deadline: a process that was stopped before its first answer cannot be found or killed.
        """
        try:
            found = await self._answered(lambda: self.until_answered(probe_of), deadline_s, "its first answer")
        except DeadlineExceeded as late:
            raise RankDied(str(late)) from late
        self.incarnation = found.incarnation

    async def call_once(self, ask: Callable[[LearnerActor], R], *, deadline_s: float, reason: str) -> R:
        """The result of one method. Raises `RankLost` if a restart may succeed, `LearnerError` if not."""
        methods = cast(LearnerActor, _NumberedMethods(self, next(self._numbers)))
        return await self._answered(lambda: _as_sent(ask(methods)), deadline_s, reason)

    async def written(self, *, deadline_s: float, reason: str) -> Any:
        """The files that the rank wrote. Raises as `call_once`, but a failed write is never a `RankLost`."""
        number = next(self._numbers)
        return await self._answered(
            lambda: _as_sent(self.methods().written(number)), deadline_s, reason, may_restart=False
        )

    async def _answered(
        self, ask: Callable[[], Awaitable[R]], deadline_s: float, reason: str, *, may_restart: bool = True
    ) -> R:
        try:
            answer = self._repeated_after_blips(ask, reason)
            return await within(answer, deadline_s, waiter=self.caller, owner=self.name, reason=reason)
        except RayTaskError as error:  # first: it is also a RayActorError if the rank called an actor that died
            cause = error.cause
            if isinstance(cause, (ConfigError, LearnerError, DeadlineExceeded)):
                raise cause from error
            kind = RankLost if may_restart and may_pass(cause) else LearnerError
            raise kind(f"{self.name} failed in {reason}: {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            if error.actor_init_failed:  # not `RankDied`: the first start ends
                raise RankLost(f"{self.name} could not be created: {last_line(error)}") from error
            raise RankDied(f"{self.name} died during {reason}") from error

    async def _repeated_after_blips(self, ask: Callable[[], Awaitable[R]], reason: str) -> R:
        while True:
            try:
                return await ask()
            except RayTaskError:
                raise
            except ActorUnavailableError:
                if not self.incarnation or not await self.same_process(BLIP_PATIENCE_S):
                    raise
                log.warning("%s was unreachable and answers again: repeating %s", self.name, reason)


def start_rank(
    config: RunConfig, model: Path, rank: int, *, run: str, caller: str, silent_s: float, **options: Any
) -> Rank:
    """Create the rank's named actor; `options` are Ray's actor options."""
    actor: Any = ray.remote(concurrency_groups={"probe": 1, "files": 1})(LearnerActor)  # pyright: ignore[reportCallIssue]
    name = rank_name(rank)
    handle = actor.options(name=name, **options).remote(config, model, rank, run)
    return Rank(handle, name, caller=caller, silent_s=silent_s)


def _as_sent(result: R) -> Awaitable[R]:
    """Cast: a rank's methods are not coroutines, but a remote call returns an awaitable reference."""
    return cast(Awaitable[R], result)


def may_pass(cause: BaseException) -> bool:
    """Whether restarted ranks may succeed after this error: out of memory, broken connection, device fault.

    torch raises `RuntimeError` (or a subclass) for faults of gloo, NCCL, CUDA and HIP, but also for mismatched shapes.
    If the error persists after restarts, the loss budget ends the run.
    """
    if isinstance(cause, (NotImplementedError, RecursionError, RayTaskError)):
        return False
    return isinstance(cause, (MemoryError, RuntimeError, ConnectionError, TimeoutError, RayError))
