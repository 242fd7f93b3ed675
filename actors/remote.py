"""Calls to actors: typed, with a deadline and a reason, and with its retries visible at the call.

    await balancer.call(lambda b: b.submit(items), deadline_s=60, reason="submitting 8 rollouts", retry=True)

The lambda receives the actor as its class, so the type checker sees the method, its arguments and its result; at run
time it builds the call, again for every retry.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.health.heartbeat import Heartbeat
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded

ASK_AGAIN_S = 0.5
"""Pause between two calls of an actor that restarts [s]."""

MAX_TRIES = 3
"""Most tries of a tool call or a program, on other executors or hosts where there are some."""

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")


F = TypeVar("F", bound=Callable[..., Any])


def in_group(name: str) -> Callable[[F], F]:
    """Serve this method in a concurrency group of its actor; `ray.method` would hide its signature."""
    return cast(Callable[[F], F], ray.method(concurrency_group=name))


class _Methods:
    """An actor handle whose methods are called like those of the class behind it."""

    def __init__(self, handle: Any, options: dict[str, Any]) -> None:
        self._handle = handle
        self._options = options

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._handle, name)
        return (method.options(**self._options) if self._options else method).remote


class Remote(Generic[A]):
    """One actor as a caller sees it. `A` is the class whose methods it answers."""

    def __init__(self, handle: Any, name: str, *, caller: str = "driver") -> None:
        """`name` and `caller` appear in the message of a deadline that passed."""
        self.handle = handle
        self.name = name
        self.caller = caller

    @classmethod
    def named(cls, name: str, *, caller: str) -> "Remote[A]":
        """The actor that Ray knows by this name."""
        return cls(ray.get_actor(name), name, caller=caller)

    def methods(self, **options: Any) -> A:
        """The actor as its class, for a call that is not awaited here; `options` are Ray's for the call."""
        return cast(A, _Methods(self.handle, options))

    async def call(
        self,
        ask: Callable[[A], Awaitable[R]],
        *,
        deadline_s: float,
        reason: str | Callable[[], str],
        retry: bool = False,
        poll: bool = False,
    ) -> R:
        """The result of one method.

        `retry`: repeat the call while Ray reports the actor unavailable, for calls that may be repeated. `poll`: an
        answer alone is not progress of the run (see `rstar_ray.deadline`). Raises `DeadlineExceeded`, what the method
        raises, and Ray's errors for an actor that is gone.
        """

        answer = self.until_answered(ask) if retry else ask(self.methods())
        return await within(answer, deadline_s, waiter=self.caller, owner=self.name, reason=reason, poll=poll)

    def future(self, ask: Callable[[A], Awaitable[R]]) -> "Future[R]":
        """The result of one method for a thread, which waits with its own deadline."""
        return cast(Any, ask(self.methods())).future()

    async def until_answered(self, ask: Callable[[A], Awaitable[R]]) -> R:
        """The result of one method, called again while Ray reports the actor unavailable; bounded by the caller."""
        while True:
            try:
                return await ask(self.methods())
            except ActorUnavailableError:
                await asyncio.sleep(ASK_AGAIN_S)

    async def probe(self, patience_s: float) -> Heartbeat | None:
        """Its heartbeat; None where no process answers in this time: the actor died, or restarts."""
        try:
            return await self.call(probe_of, deadline_s=patience_s, reason="a heartbeat", retry=True, poll=True)
        except (RayActorError, DeadlineExceeded):
            return None

    async def restart(self) -> None:
        """Kill its process, even a stopped one; Ray starts another where the actor may restart."""
        await asyncio.to_thread(ray.kill, self.handle, no_restart=False)


def probe_of(actor: Any) -> Awaitable[Heartbeat]:
    """The probe that every actor of a run answers."""
    return actor.probe()


class Batch(Generic[T]):
    """Items that an `AckedQueue` delivers together."""

    __slots__ = ("items", "number")

    def __init__(self, number: int, items: tuple[T, ...] = ()) -> None:
        self.number = number  # to acknowledge with the next `take`
        self.items = items


class AckedQueue(Generic[T]):
    """A queue for one reader in another process, delivered again until acknowledged, because a reply may be
    lost.

    The reader may see an item twice, and must recognise it. One event loop.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()  # not acknowledged yet
        self._number = 0  # of the newest item
        self._fault: BaseException | None = None
        self._changed = asyncio.Event()

    def put(self, item: T) -> None:
        self._number += 1
        self._items.append(item)
        self._changed.set()

    def close(self, fault: BaseException, *, discard: bool = False) -> None:
        """Every `take`, an open one included, raises this fault once no items are left; `discard` leaves none."""
        self._fault = fault
        if discard:
            self._items.clear()
        self._changed.set()

    async def take(self, acknowledged: int, wait_s: float) -> Batch[T]:
        """Everything after number `acknowledged`; waits up to `wait_s` for it, and is empty where nothing came.

        A number that this queue has not given is of an earlier queue, and acknowledges nothing.
        """
        if acknowledged > self._number:
            acknowledged = 0
        while self._items and self._number - len(self._items) < acknowledged:
            self._items.popleft()
        if not self._items and self._fault is None:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                return Batch(acknowledged)
        if self._fault is not None and not self._items:
            raise self._fault
        return Batch(self._number, tuple(self._items))


class ReplyCache:
    """An actor's newest reply, or failure, by its call's number, so that a repeated call has no second effect.

    Calls come one after the other.
    """

    def __init__(self) -> None:
        self._number = 0
        self._reply: Any = None
        self._failure: Exception | None = None

    def of(self, number: int, work: Callable[[], R]) -> R:
        """What `work` returns or raises; the recorded result where the newest call had this number."""
        if number != self._number:
            self._reply, self._failure = None, None
            try:
                self._reply = work()
            except Exception as failure:
                self._failure = failure
            self._number = number
        if self._failure is not None:
            raise self._failure
        return self._reply
