"""Whether Ray's head is there: asked now and then, in a separate thread, since a question to a dead one blocks.

Ray itself ends the driver a minute after the head has died, and until then says nothing, while a run that needs nothing
of it continues. A head that is stopped, or whose machine is cut off, Ray waits for without end: the run does not.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from actors.cluster.process_start import birth

log = logging.getLogger(__name__)

SILENT_S = 6.0
"""A death is to be said within ten seconds: it may fall just after an answer, and the next question comes later."""
GONE_S = 90.0
"""After so long without an answer the head is given up: longer than Ray takes to end the driver of a dead one."""
EVERY_S = 2.0
LAST_ANSWER_S = 1.0
"""For a question that is open when the run ends: Ray should not be shut down under it."""
EXIT_S = 120.0
"""Ray releases a driver, and ends its own head, within seconds; a busy machine takes several times as long."""


class Ending:
    """How this process is to end, once that is known: where Ray holds its end up, with this status all the same."""

    status = 1


class HeadProbe:
    """One for a run, in its driver; `close` last."""

    def __init__(
        self,
        ask: Callable[[], Any],
        *,
        silent_s: float = SILENT_S,
        gone_s: float = GONE_S,
        every_s: float = EVERY_S,
    ) -> None:
        """`ask` returns once the head has answered. `silent_s`: after so long without one a line says so."""
        self._ask = ask
        self.answer: Any = None  # the latest
        self._silent_s = silent_s
        self._gone_s = gone_s
        self._every_s = every_s
        self._looked_s = 0.0
        self._waited_s = 0.0  # for the answer to a question, while this process ran: it may be stopped, too
        self._waited_for: float | None = None  # that question, by when it was asked
        self._asked_s: float | None = None  # the question that is open
        self._said = False
        self._closed = threading.Event()
        # A daemon: a head that is gone leaves its last question open for a minute.
        self._thread = threading.Thread(target=self._ask_for_ever, name="head", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(LAST_ANSWER_S)

    def look(self) -> None:
        """Say what is new; called now and then, from one thread."""
        asked_s, now_s = self._asked_s, time.monotonic()
        since_s = min(now_s - self._looked_s, 2 * self._every_s)
        self._waited_s = self._waited_s + since_s if asked_s is not None and asked_s == self._waited_for else 0.0
        self._waited_for, self._looked_s = asked_s, now_s
        if not self._said and self._waited_s > self._silent_s:
            self._said = True
            log.warning(
                f"Ray's head has not answered for {self._waited_s:.0f} s: where it is gone the run ends within"
                f" {self._gone_s:.0f} s, and the same command resumes"
            )
        elif self._said and asked_s is None:
            self._said = False
            log.warning("Ray's head answers again")

    @property
    def silent(self) -> bool:
        """It is said that it does not answer, and it has not since."""
        return self._said and self._asked_s is not None

    def fault(self) -> str:
        """Why the run has to end; empty while it has not."""
        if self._waited_s < self._gone_s:
            return ""
        return f"Ray's head has not answered for {self._waited_s:.0f} s; start it again, and give the same command"

    def _ask_for_ever(self) -> None:
        while not self._closed.is_set():
            if self._asked_s is None:
                self._asked_s = time.monotonic()
            with contextlib.suppress(Exception):  # refused at once is no answer, either: the question stays open
                self.answer = self._ask()
                self._asked_s = None
            self._closed.wait(self._every_s)


async def in_time(act: Callable[[], object], seconds: float) -> None:
    """Have Ray do something that it does not do where its head is gone: then it blocks, in a thread that nobody waits
    for."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            act()
        with contextlib.suppress(RuntimeError):  # the loop is closed by then
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="head, at the end", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), seconds)


def exit_within(seconds: float = EXIT_S) -> None:
    """For the end of a process: what Ray does then waits for a head that does not answer. What it leaves is killed."""
    below = _below()  # now: who loses its parent is not found below this process any more

    def end() -> None:
        for pid, born in (below | _below()).items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if birth(pid) == born:
                    psutil.Process(pid).kill()
        os._exit(Ending.status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # Python 3.12.0 and 3.12.1 start no thread so late
        timer.start()


def _below() -> dict[int, str]:
    """The processes below this one: ids and beginnings."""
    found: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = birth(process.pid)
    return found
