"""Sets metrics of this process. A failure never reaches the caller: it is logged once, and the export stops."""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.telemetry.registry import BY_EXPORTED_NAME, Kind, Metric

log = logging.getLogger(__name__)


RecordFn = Callable[[float, Mapping[str, str]], None]
"""Sets a gauge, adds to a counter or observes in a histogram: the value, and the labels without `run`."""
OpenFn = Callable[[Metric], RecordFn]
"""Registers a metric in the library that exports it."""


class Meter:
    """Sets metrics by their exported names. Without `open_instrument` it does nothing, at almost no cost.

    Use one per process and run: with two, `reached` would count the same increase twice.
    """

    def __init__(self, open_instrument: OpenFn | None = None, *, run: str = "") -> None:
        self.run = run  # the label `run` of all its metrics
        self._open = open_instrument
        self._instruments: dict[str, RecordFn] = {}
        self._reached: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Set a gauge; None leaves it unchanged."""
        if value is not None:
            self._record(name, Kind.GAUGE, value, labels)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Increase a counter."""
        if amount > 0:
            self._record(name, Kind.COUNTER, amount, labels)

    def reached(self, name: str, total: float, **labels: str) -> None:
        """Increase a counter to `total`, its value since this process started.

        A total below the last one means that the source restarted; then all of it is added.
        """
        key = (name, tuple(sorted(labels.items())))
        before = self._reached.get(key, 0.0)
        self._reached[key] = total
        self.add(name, total - before if total >= before else total, **labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        self._record(name, Kind.HISTOGRAM, value, labels)

    @contextmanager
    def guarded(self) -> Generator[None, None, None]:
        """Wraps code that reads values to export: a failure is logged, and the export stops."""
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
            record = self._instruments.get(name)
            if record is None:
                record = self._instruments[name] = opened(declared(name, kind, labels))
            record(float(value), labels)
            self._open = opened


def declared(name: str, kind: Kind, labels: Mapping[str, str]) -> Metric:
    """The registry's entry. Raises `ValueError` for an unknown name, or a different kind or labels."""
    metric = BY_EXPORTED_NAME.get(name)
    if metric is None or metric.kind is not kind or set(metric.labels) != set(labels):
        raise ValueError(f"no {kind} {name} with the labels {sorted(labels)} is declared")
    return metric


NO_METER = Meter()
"""Exports nothing."""
