"""The one way to wait on another process: with a deadline, an owner and a reason."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rstar_ray.errors import DeadlineExceeded

T = TypeVar("T")


async def within(
    awaitable: Awaitable[T], seconds: float, *, waiter: str, owner: str, reason: str | Callable[[], str]
) -> T:
    """Await for at most `seconds`.

    Works on coroutines, futures and Ray object refs alike. A `reason` that costs something to find is a function,
    called when the time is out. Raises `DeadlineExceeded` naming all
    four arguments; a `TimeoutError` raised by the awaited work itself passes through unchanged.
    """

    async def work() -> T:
        return await awaitable

    task = asyncio.ensure_future(work())
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task.result()
    task.cancel()
    raise DeadlineExceeded(waiter, owner, reason if isinstance(reason, str) else reason(), seconds)
