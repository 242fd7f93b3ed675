"""How long each rollout waits for a replica, and what held the queue up meanwhile. No clock: times are told."""

from collections.abc import Iterable
from enum import StrEnum


class Held(StrEnum):
    """What keeps the next in line from a replica."""

    REPLICA = "no replica takes work"
    SEAT = "every replica holds as many rollouts as it may"
    ROOM = "no replica has room in its KV cache for the next in line"


class Waits:
    """Sums how long the queue was held up, and by what; a rollout's share is what was added while it waited."""

    def __init__(self) -> None:
        self._sums_s = dict.fromkeys(Held, 0.0)
        self._held: Held | None = None
        self._since_s = 0.0
        self._queued: dict[str, tuple[float, dict[Held, float]]] = {}
        self._taken_s = dict(self._sums_s)

    def note(self, held: Held | None, now_s: float) -> None:
        """What holds the queue up from now on; None where it is empty."""
        if self._held is not None:
            self._sums_s[self._held] += now_s - self._since_s
        self._held, self._since_s = held, now_s

    def begin(self, rollout_ids: Iterable[str], now_s: float) -> None:
        """These wait from now on; those that wait already go on waiting."""
        self.note(self._held, now_s)
        for rollout_id in rollout_ids:
            self._queued.setdefault(rollout_id, (now_s, dict(self._sums_s)))

    def end(self, rollout_id: str, now_s: float) -> tuple[float, dict[str, float]]:
        """It waits no longer: the seconds that it did, and those of them for which the queue was held up, by what."""
        self.note(self._held, now_s)
        since_s, before = self._queued.pop(rollout_id, (now_s, self._sums_s))
        return now_s - since_s, _more(self._sums_s, before)

    def forget(self, rollout_id: str) -> None:
        """Nobody waits for it."""
        self._queued.pop(rollout_id, None)

    def take(self, now_s: float) -> dict[str, float]:
        """Seconds for which the queue was held up since this was asked last, by what."""
        self.note(self._held, now_s)
        before, self._taken_s = self._taken_s, dict(self._sums_s)
        return _more(self._sums_s, before)


def _more(now: dict[Held, float], before: dict[Held, float]) -> dict[str, float]:
    """Where it is anything to speak of: a millisecond."""
    grown = {str(held): round(now[held] - before[held], 3) for held in Held}
    return {held: seconds for held, seconds in grown.items() if seconds}
