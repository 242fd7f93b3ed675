"""Whether Ray's head is there: asked now and then, in a thread of its own, since a question to a dead one blocks.

Ray itself ends the driver a minute after the head has died, and until then says nothing, while a run that needs nothing
of it goes on.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

SILENT_S = 6.0
"""A death is to be said within ten seconds: it may fall just after an answer, and the next question comes later."""
EVERY_S = 2.0
LAST_ANSWER_S = 1.0
"""For a question that is open when the run ends: Ray should not be shut down under it."""


class HeadProbe:
    """One for a run, in its driver; `close` last."""

    def __init__(
        self,
        ask: Callable[[], Any],
        *,
        show: Callable[[str], None],
        silent_s: float = SILENT_S,
        every_s: float = EVERY_S,
    ) -> None:
        """`ask` returns once the head has answered. `silent_s`: after so long without one a line says so."""
        self._ask = ask
        self.answer: Any = None  # the latest
        self._show = show
        self._silent_s = silent_s
        self._every_s = every_s
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
        """Say what is new; called now and then, from any thread."""
        asked_s = self._asked_s
        silent_s = 0.0 if asked_s is None else time.monotonic() - asked_s
        if not self._said and silent_s > self._silent_s:
            self._said = True
            self._show(
                f"Ray's head has not answered for {silent_s:.0f} s: where it is gone Ray ends the run within a minute,"
                " and the same command goes on"
            )
        elif self._said and asked_s is None:
            self._said = False
            self._show("Ray's head answers again")

    def _ask_for_ever(self) -> None:
        while not self._closed.is_set():
            if self._asked_s is None:
                self._asked_s = time.monotonic()
            with contextlib.suppress(Exception):  # refused at once is no answer, either: the question stays open
                self.answer = self._ask()
                self._asked_s = None
            self._closed.wait(self._every_s)
