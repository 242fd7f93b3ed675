"""Calls of the learner's ranks: each is done once and its answer heard, and a failure says whether to begin again.

What could not be reached for a moment may have done what it was asked for, or never have heard of it: it is asked again
under the same number, and a rank that has an answer under that number gives it once more.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from actors.probe import life_of, when_available
from rstar_ray.deadline import within
from rstar_ray.errors import ConfigError, DeadlineExceeded, LearnerError, RankLost

log = logging.getLogger(__name__)

BLIP_PATIENCE_S = 10.0
"""How long a rank that could not be reached may take to answer again before it is taken for lost."""

T = TypeVar("T")


class RankDied(RankLost):
    """Its process is gone, and what other ranks say of their connections follows from that."""


class KeptAnswer:
    """At a rank: the newest answer, or failure, under its call's number. Calls come one after the other."""

    def __init__(self) -> None:
        self._number = 0
        self._answer: Any = None
        self._failure: Exception | None = None

    def of(self, number: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises; what it did, where the newest call had this number."""
        if number != self._number:
            self._answer, self._failure = None, None
            try:
                self._answer = work()
            except Exception as failure:
                self._failure = failure
            self._number = number
        if self._failure is not None:
            raise self._failure
        return self._answer


class CalledRank:
    """One rank as the driver calls it, for one life of its process."""

    def __init__(self, handle: Any, name: str, waiter: str) -> None:
        self.handle = handle
        self.name = name
        self._waiter = waiter
        self._life: str | None = None  # known once it was met
        self._numbers = itertools.count(1)

    async def meet(self, seconds: float) -> None:
        """Wait for its first answer, and learn which life it is: one that is found again must be the same.

        Raises `RankDied` where none comes in this time: a process that is stopped by then is never heard of, nor ended.
        """
        try:
            self._life = (await self._told(self._sign, seconds, "its first answer", begins_again=may_pass)).life
        except DeadlineExceeded as late:
            raise RankDied(str(late)) from late

    async def _sign(self) -> Any:
        return await when_available(self.handle.probe.remote)

    async def call(self, method: str, *arguments: Any, seconds: float, reason: str) -> Any:
        """Its method's answer. Raises `RankLost` where new ranks may do better, `LearnerError` where not."""
        number = next(self._numbers)
        named = self.handle.call.options(name=f"{self.name} {method}")
        return await self._told(lambda: named.remote(number, method, arguments), seconds, reason, begins_again=may_pass)

    async def written(self, *, seconds: float, reason: str) -> Any:
        """What it wrote to disk. Raises as `call`; what it could not write is its node's to mend, and no loss."""
        number = next(self._numbers)
        return await self._told(
            lambda: self.handle.written.remote(number), seconds, reason, begins_again=lambda cause: False
        )

    async def _told(
        self,
        ask: Callable[[], Awaitable[Any]],
        seconds: float,
        reason: str,
        *,
        begins_again: Callable[[BaseException], bool],
    ) -> Any:
        try:
            return await within(
                self._answered(ask, reason), seconds, waiter=self._waiter, owner=self.name, reason=reason
            )
        except RayTaskError as error:  # before the next: it may be both, where the rank called an actor that died
            cause = error.cause
            if isinstance(cause, (ConfigError, LearnerError, DeadlineExceeded)):
                raise cause from error
            kind = RankLost if begins_again(cause) else LearnerError
            raise kind(f"{self.name} failed in {reason}: {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            if error.actor_init_failed:  # it was not killed: in a run's first start people are told at once
                raise RankLost(f"{self.name} could not be made: {str(error).strip().splitlines()[-1]}") from error
            raise RankDied(f"{self.name} died during {reason}") from error

    async def _answered(self, ask: Callable[[], Awaitable[Any]], reason: str) -> Any:
        while True:
            try:
                return await ask()
            except RayTaskError:
                raise
            except ActorUnavailableError:
                if self._life is None or await life_of(self.handle, BLIP_PATIENCE_S) != self._life:
                    raise
                log.warning("%s could not be reached and answers again: it is asked again for %s", self.name, reason)


def may_pass(cause: BaseException) -> bool:
    """Whether new ranks may get on where one met this: an end of memory, a broken connection, a fault of a device.

    torch tells of what gloo, NCCL, CUDA and HIP met by `RuntimeError` and its kinds, and of shapes that do not match as
    well: which of these would come again shows when it does, and then `rstar_ray.repeat` ends the run.
    """
    if isinstance(cause, (NotImplementedError, RecursionError, RayTaskError)):
        return False
    return isinstance(cause, (MemoryError, RuntimeError, ConnectionError, TimeoutError, RayError))
