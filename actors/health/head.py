"""Watches Ray's head: polled in a separate thread, because a call to a dead head blocks.

Ray ends the driver a minute after the head has died, and does not log anything until then. If the head is stopped or
its machine is unreachable, Ray waits without a limit; this module ends the run instead.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from actors.cluster.process_start import start_time

log = logging.getLogger(__name__)

SILENT_S = 6.0
"""With this limit a death is reported within ten seconds, even if it follows an answer immediately."""
GONE_S = 90.0
"""The run ends after this time without an answer; longer than Ray takes to end the driver of a dead head."""
EVERY_S = 2.0
LAST_ANSWER_S = 1.0
"""Wait for an open poll at the end of the run, because Ray should not be shut down during a call."""
EXIT_S = 120.0
"""Limit for Ray's shutdown, which takes seconds, and several times as long on a busy machine."""


class Ending:
    """The exit status of this process, for `exit_within` if Ray's shutdown blocks."""

    status = 1


class HeadProbe:
    """One per run, in its driver; call `close` last."""

    def __init__(
        self,
        ask: Callable[[], Any],
        *,
        silent_s: float = SILENT_S,
        gone_s: float = GONE_S,
        every_s: float = EVERY_S,
    ) -> None:
        """`ask` returns when the head has answered. `silent_s`: time without an answer before a warning is logged."""
        self._ask = ask
        self.answer: Any = None  # the latest
        self._silent_s = silent_s
        self._gone_s = gone_s
        self._every_s = every_s
        self._looked_s = 0.0
        self._waited_s = 0.0  # age of the open poll, without time in which this process was suspended
        self._waited_for: float | None = None  # start of that poll
        self._asked_s: float | None = None  # start of the open poll
        self._said = False
        self._closed = threading.Event()
        # A daemon thread, because a call to a dead head blocks for a minute.
        self._thread = threading.Thread(target=self._poll, name="head", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(LAST_ANSWER_S)

    def look(self) -> None:
        """Log what changed; called periodically, from one thread."""
        asked_s, now_s = self._asked_s, time.monotonic()
        since_s = min(now_s - self._looked_s, 2 * self._every_s)
        self._waited_s = self._waited_s + since_s if asked_s is not None and asked_s == self._waited_for else 0.0
        self._waited_for, self._looked_s = asked_s, now_s
        if not self._said and self._waited_s > self._silent_s:
            self._said = True
            log.warning(
                f"Ray's head has not answered for {self._waited_s:.0f} s: if it is lost, the run ends within"
                f" {self._gone_s:.0f} s, and the same command resumes"
            )
        elif self._said and asked_s is None:
            self._said = False
            log.warning("Ray's head answers again")

    @property
    def silent(self) -> bool:
        """Whether a warning was logged and the head has not answered since."""
        return self._said and self._asked_s is not None

    def fault(self) -> str:
        """Why the run must end; empty if it need not."""
        if self._waited_s < self._gone_s:
            return ""
        return f"Ray's head has not answered for {self._waited_s:.0f} s; restart it and repeat the command"

    def _poll(self) -> None:
        while not self._closed.is_set():
            if self._asked_s is None:
                self._asked_s = time.monotonic()
            with contextlib.suppress(Exception):  # a refused call is not an answer: the poll stays open
                self.answer = self._ask()
                self._asked_s = None
            self._closed.wait(self._every_s)


def exit_within(seconds: float = EXIT_S) -> None:
    """Exit after `seconds` and kill the child processes, if Ray's shutdown waits for a head that does not answer.
    Call it at the end of the process, before Ray's shutdown.
    """
    below = _below()  # now, because orphans are no longer descendants of this process later

    def end() -> None:
        for pid, started in (below | _below()).items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if start_time(pid) == started:
                    psutil.Process(pid).kill()
        os._exit(Ending.status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # Python 3.12.0 and 3.12.1 start no thread during interpreter shutdown
        timer.start()


def _below() -> dict[int, str]:
    """Start times of this process's descendants, by process id."""
    found: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = start_time(process.pid)
    return found
