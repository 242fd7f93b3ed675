"""Lines that tell a person how far something long has come."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY_S = 20.0
"""Shortest time between two lines."""


class Progress:
    """Counts what has ended, and says so now and then: "aime2024: 12 of 30 problems, 40 s"."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        done: int = 0,
        unit: str = "problems",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done`: so many of the total had ended before this began."""
        self._what, self._total, self._unit = what, total, unit
        self._clock = clock
        self._ended = done
        self._began_s = self._said_s = clock()

    def ended(self, count: int = 1, note: str = "") -> None:
        """So many more are done; `note` goes with the line, where one is due."""
        self._ended += count
        now_s = self._clock()
        if now_s - self._said_s >= EVERY_S and self._ended < self._total:
            self._said_s = now_s
            after = f", {note}" if note else ""
            taken = f"{now_s - self._began_s:.0f} s"
            log.info(f"{self._what}: {self._ended:,} of {self._total:,} {self._unit}, {taken}{after}")
