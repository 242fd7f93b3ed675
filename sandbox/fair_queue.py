"""A queue that serves its callers in turn, each in its own order."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out within a caller; round-robin between callers, so none starves another."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        self._turns: deque[str] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def push(self, caller: str, item: T) -> None:
        """Queue behind the caller's own items."""
        self._of(caller).append(item)

    def push_front(self, caller: str, item: T) -> None:
        """Queue an item that has waited already, before all others."""
        self._of(caller).appendleft(item)
        self._turns.remove(caller)
        self._turns.appendleft(caller)

    def first(self) -> T:
        """The item that `pop` would return."""
        return self._waiting[self._turns[0]][0]

    def pop(self) -> T:
        """Take the next item of the caller whose turn it is."""
        caller = self._turns.popleft()
        own = self._waiting[caller]
        item = own.popleft()
        if own:
            self._turns.append(caller)
        else:
            del self._waiting[caller]
        return item

    def _of(self, caller: str) -> deque[T]:
        own = self._waiting.get(caller)
        if own is None:
            own = self._waiting[caller] = deque()
            self._turns.append(caller)
        return own
