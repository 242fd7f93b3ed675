"""Calls of the learner's ranks: each is done once, and its failure says whether new ranks may do better.

A rank that could not be reached for a moment may have done the call, or never received it. The call is repeated under
the same number, and a rank that has a reply under that number returns it again.
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
from rstar_ray.errors import ConfigError, DeadlineExceeded, LearnerError, RankLost

log = logging.getLogger(__name__)

BLIP_PATIENCE_S = 10.0
"""How long a rank that could not be reached may take to answer again before it counts as lost."""

R = TypeVar("R")


class RankDied(RankLost):
    """Its process is gone; failed connections of other ranks follow from that."""


class _NumberedMethods:
    """A rank's methods, called through `LearnerActor.call` under one number."""

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
        """Wait for its first answer and remember its process. Raises `RankDied` without one: a process that was
        stopped before cannot be found, nor ended."""
        try:
            found = await self._answered(lambda: self.until_answered(probe_of), deadline_s, "its first answer")
        except DeadlineExceeded as late:
            raise RankDied(str(late)) from late
        self.incarnation = found.incarnation

    async def call_once(self, ask: Callable[[LearnerActor], R], *, deadline_s: float, reason: str) -> R:
        """The result of one method. Raises `RankLost` where new ranks may do better, `LearnerError` where not."""
        methods = cast(LearnerActor, _NumberedMethods(self, next(self._numbers)))
        return await self._answered(lambda: _as_sent(ask(methods)), deadline_s, reason)

    async def written(self, *, deadline_s: float, reason: str) -> Any:
        """What it wrote to disk. Raises as `call_once`, but a file that it could not write is not a lost rank."""
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
        except RayTaskError as error:  # before the next: it may be both, where the rank called an actor that died
            cause = error.cause
            if isinstance(cause, (ConfigError, LearnerError, DeadlineExceeded)):
                raise cause from error
            kind = RankLost if may_restart and may_pass(cause) else LearnerError
            raise kind(f"{self.name} failed in {reason}: {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            if error.actor_init_failed:  # it was not killed: the first start of a run ends at once
                raise RankLost(f"{self.name} could not be created: {str(error).strip().splitlines()[-1]}") from error
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
                log.warning("%s could not be reached and answers again: repeating %s", self.name, reason)


def start_rank(
    config: RunConfig, model: Path, rank: int, *, run: str, caller: str, silent_s: float, **options: Any
) -> Rank:
    """The rank's actor, under its name; `options` are Ray's."""
    actor: Any = ray.remote(concurrency_groups={"probe": 1, "files": 1})(LearnerActor)  # pyright: ignore[reportCallIssue]
    name = rank_name(rank)
    handle = actor.options(name=name, **options).remote(config, model, rank, run)
    return Rank(handle, name, caller=caller, silent_s=silent_s)


def _as_sent(result: R) -> Awaitable[R]:
    """The methods of a rank are no coroutines; a remote call of one returns a reference to its result."""
    return cast(Awaitable[R], result)


def may_pass(cause: BaseException) -> bool:
    """Whether new ranks may succeed where one met this: out of memory, a broken connection, a fault of a device.

    torch reports faults of gloo, NCCL, CUDA and HIP as `RuntimeError` and its kinds, and mismatched shapes as well. A
    fault that occurs again after restarts ends the run by the loss budget.
    """
    if isinstance(cause, (NotImplementedError, RecursionError, RayTaskError)):
        return False
    return isinstance(cause, (MemoryError, RuntimeError, ConnectionError, TimeoutError, RayError))
