"""Calls of the learner's ranks: each is done once, and a failure says whether to start again.

A rank that could not be reached for a moment may have done the call, or never received it: it is called again under the
same number, and a rank that has a reply under that number returns it again.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from actors.remote import Remote
from rstar_ray.deadline import within
from rstar_ray.errors import ConfigError, DeadlineExceeded, LearnerError, RankLost

if TYPE_CHECKING:
    from actors.learner.learner_actor import LearnerActor

log = logging.getLogger(__name__)

BLIP_PATIENCE_S = 10.0
"""How long a rank that could not be reached may take to answer again before it is taken for lost."""

R = TypeVar("R")


class RankDied(RankLost):
    """Its process is gone, and what other ranks report of their connections follows from that."""


class _NumberedMethods:
    """A rank's methods, called through `LearnerActor.call` under one number."""

    def __init__(self, rank: "RankClient", number: int) -> None:
        self._rank = rank
        self._number = number

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        named = self._rank.actor.handle.call.options(name=f"{self._rank.name} {method}")
        return lambda *arguments: named.remote(self._number, method, arguments)


class RankClient:
    """One rank as the driver calls it, for one life of its process."""

    def __init__(self, actor: "Remote[LearnerActor]") -> None:
        self.actor = actor
        self.name = actor.name
        self._incarnation: str | None = None  # known after `connect`
        self._numbers = itertools.count(1)

    async def connect(self, deadline_s: float) -> None:
        """Wait for its first answer, and learn its incarnation: a rank that answers later must be the same.

        Raises `RankDied` where none comes in this time: a process that was stopped before cannot be found, nor ended.
        """
        reason = "its first answer"
        try:
            sign = await self._answered(
                lambda: self.actor.until_answered(lambda rank: _as_sent(rank.probe())), deadline_s, reason
            )
        except DeadlineExceeded as late:
            raise RankDied(str(late)) from late
        self._incarnation = sign.life

    async def call(self, ask: "Callable[[LearnerActor], R]", *, deadline_s: float, reason: str) -> R:
        """The result of one method. Raises `RankLost` where new ranks may do better, `LearnerError` where not."""
        methods = cast("LearnerActor", _NumberedMethods(self, next(self._numbers)))
        return await self._answered(lambda: _as_sent(ask(methods)), deadline_s, reason)

    async def written(self, *, deadline_s: float, reason: str) -> Any:
        """What it wrote to disk. Raises as `call`, but a file that it could not write is not a lost rank."""
        number = next(self._numbers)
        return await self._answered(
            lambda: _as_sent(self.actor.methods().written(number)), deadline_s, reason, may_restart=False
        )

    async def _answered(
        self, ask: Callable[[], Awaitable[R]], deadline_s: float, reason: str, *, may_restart: bool = True
    ) -> R:
        try:
            return await within(
                self._until_answered(ask, reason), deadline_s, waiter=self.actor.caller, owner=self.name, reason=reason
            )
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

    async def _until_answered(self, ask: Callable[[], Awaitable[R]], reason: str) -> R:
        while True:
            try:
                return await ask()
            except RayTaskError:
                raise
            except ActorUnavailableError:
                if self._incarnation is None or await self.actor.incarnation(BLIP_PATIENCE_S) != self._incarnation:
                    raise
                log.warning("%s could not be reached and answers again: repeating %s", self.name, reason)


def _as_sent(result: R) -> Awaitable[R]:
    """The methods of a rank are no coroutines; called from here, each gives a reference to its result."""
    return cast(Awaitable[R], result)


def may_pass(cause: BaseException) -> bool:
    """Whether new ranks may get on where one met this: an end of memory, a broken connection, a fault of a device.

    torch tells of what gloo, NCCL, CUDA and HIP met by `RuntimeError` and its kinds, and of shapes that do not match as
    well: which of these would come again shows when it does, and then `rstar_ray.learner_restart` ends the run.
    """
    if isinstance(cause, (NotImplementedError, RecursionError, RayTaskError)):
        return False
    return isinstance(cause, (MemoryError, RuntimeError, ConnectionError, TimeoutError, RayError))
