"""Exports metrics through Ray: each process sends them to its node's agent, which Prometheus scrapes.

Recording a value takes some microseconds; Ray sends values every ten seconds, in a separate thread.
"""

from collections.abc import Callable

from ray.util.metrics import Counter, Gauge, Histogram

from rstar_ray.telemetry.meter import Meter, RecordFn
from rstar_ray.telemetry.registry import Kind, Metric


def open_metric(metric: Metric, run: str) -> RecordFn:
    """Register a metric with Ray; returns the function that records its values."""
    keys = ("run", *metric.labels)
    put: Callable[[float, dict[str, str]], None]
    if metric.kind is Kind.GAUGE:
        put = Gauge(metric.exported_name, metric.help, keys).set
    elif metric.kind is Kind.COUNTER:
        put = Counter(metric.exported_name, metric.help, keys).inc
    else:
        put = Histogram(metric.exported_name, metric.help, list(metric.boundaries), keys).observe
    return lambda value, labels: put(value, {"run": run, **labels})


def ray_meter(run: str) -> Meter:
    """The meter of this process, which must be connected to Ray; `run` is the run directory's name."""
    return Meter(lambda metric: open_metric(metric, run), run=run)
