"""Progress messages of long work."""

import logging
import time

log = logging.getLogger(__name__)

EVERY_S = 20.0
"""Shortest time between two messages."""


class Progress:
    """Counts finished problems, and logs the count at intervals: "aime2024: 12 of 30 problems, 40 s"."""

    def __init__(self, what: str, total: int, *, done: int = 0) -> None:
        """`done`: problems that were finished before."""
        self._what, self._total = what, total
        self._ended = done
        self._began_s = self._logged_s = time.monotonic()

    def ended(self, count: int = 1, note: str = "") -> None:
        """Count finished problems; `note` is appended to the next message."""
        self._ended += count
        now_s = time.monotonic()
        if now_s - self._logged_s >= EVERY_S and self._ended < self._total:
            self._logged_s = now_s
            after = f", {note}" if note else ""
            taken = f"{now_s - self._began_s:.0f} s"
            log.info(f"{self._what}: {self._ended:,} of {self._total:,} problems, {taken}{after}")
