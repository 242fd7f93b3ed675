"""A pool's metrics for Prometheus, computed when scraped, so that a call costs nothing here.

Names and meanings are those that a run exports (`rstar_ray.telemetry.registry`), without `rstar_` before them.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rstar_ray.telemetry.registry import Kind
from sandbox.pool import SandboxPool
from sandbox.pool_metrics import pool_figures


class PoolCollector(Collector):
    """Turns `SandboxPool.stats()` into metric families."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric, value, labels in pool_figures(self._pool.stats()):
            family = families.get(metric.exported_name)
            if family is None:
                made = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                family = families[metric.exported_name] = made(metric.name, metric.help, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()
