"""Progress messages of long work."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY_S = 20.0
"""Shortest time between two messages."""


class Progress:
    """Counts finished items, and logs the count at intervals: "aime2024: 12 of 30 problems, 40 s"."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        done: int = 0,
        unit: str = "problems",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done`: items that were finished before."""
        self._what, self._total, self._unit = what, total, unit
        self._clock = clock
        self._ended = done
        self._began_s = self._logged_s = clock()

    def ended(self, count: int = 1, note: str = "") -> None:
        """Count finished items; `note` is appended to the next message."""
        self._ended += count
        now_s = self._clock()
        if now_s - self._logged_s >= EVERY_S and self._ended < self._total:
            self._logged_s = now_s
            after = f", {note}" if note else ""
            taken = f"{now_s - self._began_s:.0f} s"
            log.info(f"{self._what}: {self._ended:,} of {self._total:,} {self._unit}, {taken}{after}")
