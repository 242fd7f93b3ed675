"""Watches the driver's event loop from a thread: while the loop is blocked, by a file system that does not answer for
example, nothing else in the driver can report it.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from actors.health.head import exit_within

log = logging.getLogger(__name__)

FRAMES = 3
"""Innermost calls that a message names."""


class LoopWatch:
    """One per run, in its driver. Call `start` in the event loop, and `close` last."""

    def __init__(
        self, *, silent_s: float, still_s: float, every_s: float, end: Callable[[float], None] = exit_within
    ) -> None:
        """A loop that has been blocked for `silent_s` is reported; after `still_s` the process ends, by `end(0)`."""
        self._silent_s = silent_s
        self._still_s = still_s
        self._every_s = every_s
        self._end = end
        self._closed = threading.Event()

    def start(self) -> None:
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="loop watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        answered, blocked_s, reported = threading.Event(), 0.0, False
        answered.set()
        looked_s = time.monotonic()
        while not self._closed.wait(self._every_s):
            now_s = time.monotonic()
            blocked_s += min(now_s - looked_s, 2 * self._every_s)  # more if the whole process was suspended
            looked_s = now_s
            if answered.is_set():
                if reported:
                    log.warning("the driver continues")
                blocked_s, reported = 0.0, False
                answered.clear()
                try:
                    loop.call_soon_threadsafe(answered.set)
                except RuntimeError:  # the loop is closed
                    return
            elif blocked_s > self._still_s:
                log.error(
                    f"the driver has been blocked for {blocked_s:.0f} s, now in {_calls(thread)}; it ends, and the"
                    " same command resumes"
                )
                self._end(0.0)
                return
            elif blocked_s > self._silent_s and not reported:
                reported = True
                log.warning(f"the driver has been blocked for {blocked_s:.0f} s, now in {_calls(thread)}")


def _calls(thread: int) -> str:
    """The innermost calls of a thread."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    return ", from ".join(f"{Path(call.filename).name}:{call.lineno} ({call.name})" for call in reversed(stack))
