"""Whether an event loop turns, seen from another thread."""

import asyncio
import time


class Pulse:
    """Of a loop that a function may hold up, and with it all that the loop serves. Asked from one other thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked_s: float | None = None  # since when a beat is unanswered

    def held_up_s(self) -> float:
        """How long the loop has left the beat unanswered that this was the first to ask for; asks for the next."""
        asked_s = self._asked_s
        if asked_s is not None:
            return time.monotonic() - asked_s
        self._asked_s = time.monotonic()
        self._loop.call_soon_threadsafe(self._turned)
        return 0.0

    def _turned(self) -> None:
        self._asked_s = None
