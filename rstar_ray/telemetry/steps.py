"""Exports the metrics of a step: every step metric of the registry for which the step has a value."""

import os
import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from rstar_ray.errors import Stopped
from rstar_ray.run_dir.ledger import RolloutStatus
from rstar_ray.run_dir.metrics import StepMetrics
from rstar_ray.telemetry.meter import Meter
from rstar_ray.telemetry.registry import Kind, step_metric


@contextmanager
def stage_active(meter: Meter, stage: str) -> Generator[None, None, None]:
    """Wraps a stage. `rstar_run_active` stays 1 if the stage fails, so that an alert can fire."""
    meter.set("rstar_run_active", 1, stage=stage)
    try:
        yield
    except Stopped:
        meter.set("rstar_run_active", 0, stage=stage)
        raise
    meter.set("rstar_run_active", 0, stage=stage)


def export_step(meter: Meter, row: StepMetrics, run_path: Path) -> None:
    """Export all metrics of a step, and the free space on the disk."""
    _export_disk(meter, run_path)
    meter.set("rstar_step", row.step, stage=row.stage)
    meter.set("rstar_step_end_timestamp_seconds", time.time(), stage=row.stage)
    meter.add("rstar_steps_total", 1, stage=row.stage)
    for key, value in row.values.items():
        metric, labels = step_metric(key)
        put = meter.add if metric.kind is Kind.COUNTER else meter.set
        put(metric.exported_name, value, stage=row.stage, **labels)


def export_ledger(meter: Meter, statuses: Iterable[RolloutStatus], stage: str) -> None:
    """Count a step's rollouts by status."""
    for status, count in Counter(statuses).items():
        meter.add("rstar_ledger_rollouts_total", count, stage=stage, status=str(status))


def _export_disk(meter: Meter, path: Path) -> None:
    try:
        found = os.statvfs(path)
    except OSError:  # a file system that is briefly unavailable must not end a run
        return
    meter.set("rstar_disk_free_bytes", found.f_bavail * found.f_frsize)
    meter.set("rstar_disk_size_bytes", found.f_blocks * found.f_frsize)
