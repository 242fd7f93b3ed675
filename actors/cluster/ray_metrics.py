"""Metrics through Ray: each process hands them to its node's agent, whose /metrics Prometheus scrapes.

A value costs some microseconds here; Ray carries it on every ten seconds, in a thread of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from rstar_ray.telemetry.meter import Meter
from rstar_ray.telemetry.registry import Kind, Metric


class RayInstrument:
    """One metric of this process."""

    def __init__(self, metric: Metric, run: str) -> None:
        keys = ("run", *metric.labels)
        self._run = {"run": run}
        self._metric: Any
        self._put: Callable[[float, dict[str, str]], None]
        if metric.kind is Kind.GAUGE:
            self._metric = Gauge(metric.exported_name, metric.help, keys)
            self._put = self._metric.set
        elif metric.kind is Kind.COUNTER:
            self._metric = Counter(metric.exported_name, metric.help, keys)
            self._put = self._metric.inc
        else:
            self._metric = Histogram(metric.exported_name, metric.help, list(metric.boundaries), keys)
            self._put = self._metric.observe

    def record(self, value: float, labels: Mapping[str, str]) -> None:
        self._put(value, self._run | labels)  # type: ignore[operator]  # a dict in every caller


def ray_meter(run: str) -> Meter:
    """The meter of this process, which belongs to a Ray; `run` is the run directory's name."""
    return Meter(lambda metric: RayInstrument(metric, run), run=run)
