"""The one way to wait on another process: with a deadline, an owner and a reason, and the watchdog sees it."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rstar_ray.errors import DeadlineExceeded

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait of this process that has not ended."""

    waiter: str
    owner: str
    reason: str | Callable[[], str]
    since_s: float  # time.monotonic()

    def line(self, now_s: float) -> str:
        return f"{self.waiter} has waited {now_s - self.since_s:.0f} s for {self.owner} ({told(self.reason)})"


@dataclass(slots=True)
class Waits:
    """The open waits of this process, and how many have ended well: what a watchdog looks at."""

    num_answered: int = 0
    _open: dict[int, Wait] = field(default_factory=dict[int, Wait])
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def oldest(self) -> Wait | None:
        return min(self._open.values(), key=lambda wait: wait.since_s, default=None)

    def begin(self, wait: Wait) -> int:
        number = next(self._numbers)
        self._open[number] = wait
        return number

    def end(self, number: int, *, answered: bool) -> None:
        del self._open[number]
        self.num_answered += answered


waits = Waits()
"""Of this process."""


def told(reason: str | Callable[[], str]) -> str:
    return reason if isinstance(reason, str) else reason()


async def within(
    awaitable: Awaitable[T],
    seconds: float,
    *,
    waiter: str,
    owner: str,
    reason: str | Callable[[], str],
    poll: bool = False,
) -> T:
    """Await for at most `seconds`.

    Works on coroutines, futures and Ray object refs alike. A `reason` that costs something to find is a function,
    called when the time is out. A `poll` is asked again and again, and its answer alone does not mean that anything
    got on. Raises `DeadlineExceeded` naming who waited for whom; a `TimeoutError` raised by the
    awaited work itself passes through unchanged.
    """

    async def work() -> T:
        return await awaitable

    # A coroutine that is cancelled before it began is then closed, and not left for a warning.
    task: asyncio.Task[T] = asyncio.ensure_future(awaitable if asyncio.iscoroutine(awaitable) else work())
    number = waits.begin(Wait(waiter=waiter, owner=owner, reason=reason, since_s=time.monotonic()))
    answered = False
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        answered = bool(done) and not poll
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        waits.end(number, answered=answered)
    if done:
        return task.result()
    task.cancel()
    raise DeadlineExceeded(waiter, owner, told(reason), seconds)
