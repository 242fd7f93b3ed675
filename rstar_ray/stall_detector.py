"""When silence is a fault: who has been silent, or stuck at its work, for longer than its limit.

Pure rules over what processes said of themselves and a clock that is handed in. Time is counted by the detector's own
ticks: where it was held up itself (the machine stopped, slept, swapped), that gap counts for two of its ticks at most,
so that processes that were held up with it are not taken for dead. Nor does the time count in which a process wanted
a core and got none: a machine with too much to do is slow, not wedged.
"""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How long one process may be silent, and how long it may have work and get nowhere."""

    silent_s: float
    stuck_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Wedged:
    """A process past its limit, and what was seen of it."""

    name: str
    seen: str


@dataclass(slots=True)
class _Watched:
    limit: Limit
    heard_s: float  # on the detector's own clock
    moved_s: float
    starved_s: float = 0.0  # of its silence
    work: int = 0
    progress: int = 0


@dataclass(slots=True)
class Detector:
    """Judges by name; one that is found wedged is forgotten until it is watched again."""

    tick_s: float
    _now_s: float = 0.0  # own time: advances with the ticks
    _clock_s: float = math.nan  # of the latest tick, on the caller's clock
    _watched: dict[str, _Watched] = field(default_factory=dict[str, _Watched])

    def watch(self, name: str, limit: Limit) -> None:
        """From now on it has to answer; its limits start anew."""
        self._watched[name] = _Watched(limit=limit, heard_s=self._now_s, moved_s=self._now_s)

    def forget(self, name: str) -> None:
        self._watched.pop(name, None)

    def watches(self, name: str) -> bool:
        return name in self._watched

    def silences_s(self) -> dict[str, float]:
        """How long each that is watched has been silent."""
        return {name: self._now_s - one.heard_s for name, one in self._watched.items()}

    def starved(self, name: str, seconds: float) -> None:
        """So much of its silence until now it waited for a core."""
        if (one := self._watched.get(name)) is not None:
            one.starved_s = seconds

    def heard(self, name: str, *, work: int = 0, progress: int = 0) -> None:
        """It answered: `work` is how much it has to do, and `progress` another number than before where it got on."""
        one = self._watched.get(name)
        if one is None:
            return
        one.heard_s, one.starved_s = self._now_s, 0.0
        if not work or not one.work or progress != one.progress:
            one.moved_s = self._now_s
        one.work, one.progress = work, progress

    def tick(self, clock_s: float) -> list[Wedged]:
        """Who is past its limit at this time of a clock that never goes back; to be called every `tick_s`."""
        if not math.isnan(self._clock_s):
            self._now_s += min(clock_s - self._clock_s, 2 * self.tick_s)
        self._clock_s = clock_s
        wedged = [found for name, one in self._watched.items() if (found := self._judge(name, one)) is not None]
        for found in wedged:
            self.forget(found.name)
        return wedged

    def _judge(self, name: str, one: _Watched) -> Wedged | None:
        silent_s, stuck_s = self._now_s - one.heard_s - one.starved_s, self._now_s - one.moved_s
        if silent_s > one.limit.silent_s:
            return Wedged(name=name, seen=f"silent for {silent_s:.1f} s (limit {one.limit.silent_s:g} s)")
        if one.work and stuck_s > one.limit.stuck_s:
            return Wedged(
                name=name, seen=f"{one.work} to do and no step for {stuck_s:.1f} s (limit {one.limit.stuck_s:g} s)"
            )
        return None
