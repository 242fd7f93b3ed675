"""A pool's figures for Prometheus, read when scraped; a call costs nothing here."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rstar_ray.outcome import Outcome
from sandbox.pool import SandboxPool


class PoolCollector(Collector):
    """Turns `SandboxPool.stats()` into metric families."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        stats = self._pool.stats()
        calls = CounterMetricFamily("sandbox_calls", "Programs that ended, by outcome.", labels=["outcome"])
        for outcome in Outcome:
            calls.add_metric([str(outcome)], stats.finished.get(outcome, 0))
        yield calls
        for name, text, value in (
            ("accepted", "Calls taken in.", stats.accepted),
            ("refused", "Calls refused for want of room.", stats.refused),
            ("failed", "Calls that ended in an error of ours.", stats.failed),
            ("retried", "Programs given to a second cell.", stats.retried),
            ("cells_replaced", "Cells replaced by age or clean-up.", stats.cells_replaced),
            ("cells_lost", "Cells that died or stopped answering.", stats.cells_lost),
            ("servers_lost", "Warm servers that died or stopped answering.", stats.servers_lost),
            ("waiting_seconds", "Seconds calls waited for a slot.", stats.waiting_s),
            ("running_seconds", "Seconds programs ran.", stats.running_s),
            ("timed_out_seconds", "Seconds of programs that timed out.", stats.timed_out_s),
        ):
            yield CounterMetricFamily(f"sandbox_{name}", text, value=value)
        for name, text, value in (
            ("queue", "Calls waiting.", stats.waiting),
            ("running", "Programs running.", stats.running),
            ("slots", "Programs that may run at once.", stats.slots),
            ("servers_memory_bytes", "Peak resident memory of the warm servers.", stats.servers_memory_bytes),
        ):
            yield GaugeMetricFamily(f"sandbox_{name}", text, value=value)


class PoolMetrics:
    """The registry of one pool."""

    def __init__(self, pool: SandboxPool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(PoolCollector(pool))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
