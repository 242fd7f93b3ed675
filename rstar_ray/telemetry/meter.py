"""Sets metrics, and never ends or holds up what is measured: a failure is one shown line, and silence after it."""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.telemetry.declared import BY_NAME, Kind, Metric

log = logging.getLogger(__name__)


class Instrument(Protocol):
    """One metric where it is kept."""

    def record(self, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge, add to a counter, observe in a histogram; `labels` are the metric's own."""
        ...


OpenFn = Callable[[Metric], Instrument]


class Meter:
    """Metrics by their declared names. Without `open_instrument` it does nothing, at next to no cost.

    A process has one for a run: two would count the same twice where they use `reached`.
    """

    def __init__(self, open_instrument: OpenFn | None = None, *, run: str = "") -> None:
        self.run = run  # the label that all its metrics have
        self._open = open_instrument
        self._instruments: dict[str, Instrument] = {}
        self._reached: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """A gauge's value now; None, which has no meaning, leaves it as it is."""
        if value is not None:
            self._record(name, Kind.GAUGE, value, labels)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """A counter goes up by so much."""
        if amount > 0:
            self._record(name, Kind.COUNTER, amount, labels)

    def reached(self, name: str, total: float, **labels: str) -> None:
        """A counter has come to `total` since this process began; what came since the last call is added.

        One that went back began anew, and all it has come to is added.
        """
        key = (name, tuple(sorted(labels.items())))
        before = self._reached.get(key, 0.0)
        self._reached[key] = total
        self.add(name, total - before if total >= before else total, **labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One more value of a histogram."""
        self._record(name, Kind.HISTOGRAM, value, labels)

    @contextmanager
    def guarded(self) -> Generator[None, None, None]:
        """Around the reading of what is exported: a failure there is one line too, and the end of the export."""
        failed = True
        with best_effort("the export of metrics"):
            yield
            failed = False
        if failed:
            self._open = None

    def _record(self, name: str, kind: Kind, value: float, labels: Mapping[str, str]) -> None:
        if self._open is None:
            return
        opened, self._open = self._open, None
        with best_effort("the export of metrics"):
            instrument = self._instruments.get(name)
            if instrument is None:
                instrument = self._instruments[name] = opened(declared(name, kind, labels))
            instrument.record(float(value), labels)
            self._open = opened


def declared(name: str, kind: Kind, labels: Mapping[str, str]) -> Metric:
    """Raises `ValueError` for a metric that is not declared so."""
    metric = BY_NAME.get(name)
    if metric is None or metric.kind is not kind or set(metric.labels) != set(labels):
        raise ValueError(f"no {kind} {name} with the labels {sorted(labels)} is declared")
    return metric


NO_METER = Meter()
"""Measures nothing."""
