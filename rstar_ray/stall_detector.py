"""Finds processes that are silent, or have work without progress, for longer than their limit.

It uses only heartbeats and a clock that is passed in. If the detector itself was delayed (the machine was suspended or
swapped), the gap counts as at most two ticks, because the watched processes were delayed too. Time in which a process
waited for a core does not count either.
"""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How long one process may be silent, and how long it may have work without progress."""

    silent_s: float
    stuck_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A process above its limit, and a description of its state."""

    name: str
    seen: str


@dataclass(slots=True)
class _Watched:
    limit: Limit
    heard_s: float  # latest heartbeat, on the detector's clock
    progress_s: float  # latest progress, on the detector's clock
    starved_s: float = 0.0  # part of its silence in which it waited for a core
    work: int = 0
    progress: int = 0


@dataclass(slots=True)
class Detector:
    """Watches processes by name; a stalled process is removed until it is watched again."""

    tick_s: float
    _now_s: float = 0.0  # the detector's clock, which advances with the ticks
    _clock_s: float = math.nan  # latest tick, on the caller's clock
    _watched: dict[str, _Watched] = field(default_factory=dict[str, _Watched])

    def watch(self, name: str, limit: Limit) -> None:
        """Start to watch a process, or restart its limits."""
        self._watched[name] = _Watched(limit=limit, heard_s=self._now_s, progress_s=self._now_s)

    def forget(self, name: str) -> None:
        self._watched.pop(name, None)

    def watches(self, name: str) -> bool:
        return name in self._watched

    def silences_s(self) -> dict[str, float]:
        """How long each watched process has been silent."""
        return {name: self._now_s - one.heard_s for name, one in self._watched.items()}

    def starved(self, name: str, seconds: float) -> None:
        """Set how many seconds of its silence the process waited for a core."""
        if (one := self._watched.get(name)) is not None:
            one.starved_s = seconds

    def heard(self, name: str, *, work: int = 0, progress: int = 0) -> None:
        """Record a heartbeat with `work` open items; `progress` changes when the process makes progress."""
        one = self._watched.get(name)
        if one is None:
            return
        one.heard_s, one.starved_s = self._now_s, 0.0
        if not work or not one.work or progress != one.progress:
            one.progress_s = self._now_s
        one.work, one.progress = work, progress

    def tick(self, clock_s: float) -> list[Stall]:
        """Processes above their limit at this time of a monotonic clock; call it every `tick_s`."""
        if not math.isnan(self._clock_s):
            self._now_s += min(clock_s - self._clock_s, 2 * self.tick_s)
        self._clock_s = clock_s
        stalls = [found for name, one in self._watched.items() if (found := self._judge(name, one)) is not None]
        for found in stalls:
            self.forget(found.name)
        return stalls

    def _judge(self, name: str, one: _Watched) -> Stall | None:
        silent_s, stuck_s = self._now_s - one.heard_s - one.starved_s, self._now_s - one.progress_s
        if silent_s > one.limit.silent_s:
            return Stall(name=name, seen=f"silent for {silent_s:.1f} s (limit {one.limit.silent_s:g} s)")
        if one.work and stuck_s > one.limit.stuck_s:
            return Stall(
                name=name,
                seen=f"{one.work} items of work and no step for {stuck_s:.1f} s (limit {one.limit.stuck_s:g} s)",
            )
        return None
