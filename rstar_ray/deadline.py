"""Waits on other processes: each has a deadline, an owner and a reason, and is visible to the watchdog."""

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, cast

from rstar_ray.errors import DeadlineExceeded

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """An open wait of this process."""

    waiter: str
    owner: str
    reason: str | Callable[[], str]
    since_s: float  # time.monotonic()

    def line(self, now_s: float) -> str:
        return f"{self.waiter} has waited {now_s - self.since_s:.0f} s for {self.owner} ({_text(self.reason)})"


@dataclass(slots=True)
class Waits:
    """The open waits of this process, and the number of answered ones, for the watchdog."""

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


def _text(reason: str | Callable[[], str]) -> str:
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

    Works on coroutines, futures and Ray object refs. A `reason` that is expensive to compute is a function, called when
    the deadline passes. The answer to a repeated `poll` does not count as progress. Raises `DeadlineExceeded`
    with the waiter and the owner; a `TimeoutError` of the awaited work itself passes through unchanged.
    """

    async def work() -> T:
        return await awaitable

    # A coroutine that is cancelled before it began is closed, and asyncio does not warn.
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
    raise DeadlineExceeded(waiter, owner, _text(reason), seconds)


async def in_thread(
    work: Callable[[], T], seconds: float, *, waiter: str, owner: str, reason: str | Callable[[], str]
) -> T:
    """The result of `work`, which may block: neither the event loop nor the end of the process waits for its thread.

    Raises what `work` raises, and `DeadlineExceeded` after `seconds`; `work` then continues in its thread.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, raised: BaseException | None) -> None:
        if result.done():  # cancelled
            return
        if raised is not None:
            result.set_exception(raised)
        else:
            result.set_result(cast("T", value))

    def run() -> None:
        value, raised = None, None
        try:
            value = work()
        except BaseException as failed:
            raised = failed
        with suppress(RuntimeError):  # the loop is closed by then
            loop.call_soon_threadsafe(settle, value, raised)

    threading.Thread(target=run, name=owner, daemon=True).start()
    return await within(result, seconds, waiter=waiter, owner=owner, reason=reason)


async def unless_failed(work: Awaitable[T], failure: "asyncio.Future[None]", patience_s: float) -> T:
    """The result of `work`. As soon as `failure` has an exception, `work` is cancelled, which may take `patience_s`,
    and the exception is raised."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=patience_s)
        failure.result()
    return await task


def fail(failure: "asyncio.Future[None]", fault: Exception) -> None:
    """Set the exception once, without asyncio's warning for an exception that is never retrieved."""
    if not failure.done():
        failure.set_exception(fault)
        failure.exception()
