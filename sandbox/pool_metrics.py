"""A sandbox pool's statistics, their exported names, and a log line about lost processes."""

from dataclasses import dataclass, field

from rstar_ray.outcome import Outcome
from rstar_ray.telemetry.registry import PROCESS_METRICS, Metric

DECLARED = tuple(metric for metric in PROCESS_METRICS if metric.group == "sandbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Statistics of a pool since its start."""

    level: str
    slots: int
    running: int
    waiting: int  # calls in the queue
    accepted: int
    refused: int  # because the queue was full
    finished: dict[str, int] = field(default_factory=dict[str, int])  # results by outcome
    failed: int  # calls that ended in a SandboxError
    retried: int  # programs given to a second worker
    workers_replaced: int  # for age, or because a program left files in its folder
    workers_lost: int  # died or stuck
    servers_lost: int
    waiting_s: float  # sum over calls: accepted to started
    running_s: float  # sum over calls: started to finished
    timed_out_s: float  # the part of running_s that went to time-outs
    servers_memory_bytes: int  # peak resident memory of all warm servers


def pool_figures(stats: PoolStats) -> list[tuple[Metric, float, dict[str, str]]]:
    """Every declared metric with its value and its labels except `executor`."""
    by_outcome = "rstar_sandbox_calls_total"
    values = {
        "rstar_sandbox_accepted_total": stats.accepted,
        "rstar_sandbox_refused_total": stats.refused,
        "rstar_sandbox_failed_total": stats.failed,
        "rstar_sandbox_retried_total": stats.retried,
        "rstar_sandbox_workers_replaced_total": stats.workers_replaced,
        "rstar_sandbox_workers_lost_total": stats.workers_lost,
        "rstar_sandbox_servers_lost_total": stats.servers_lost,
        "rstar_sandbox_waiting_seconds_total": stats.waiting_s,
        "rstar_sandbox_running_seconds_total": stats.running_s,
        "rstar_sandbox_timed_out_seconds_total": stats.timed_out_s,
        "rstar_sandbox_queue": stats.waiting,
        "rstar_sandbox_running": stats.running,
        "rstar_sandbox_slots": stats.slots,
        "rstar_sandbox_servers_memory_bytes": stats.servers_memory_bytes,
    }
    figures: list[tuple[Metric, float, dict[str, str]]] = []
    for metric in DECLARED:
        if metric.exported_name == by_outcome:
            figures += [(metric, stats.finished.get(outcome, 0), {"outcome": str(outcome)}) for outcome in Outcome]
        else:
            figures.append((metric, values[metric.exported_name], {}))
    return figures


def lost_since(before: PoolStats | None, now: PoolStats) -> tuple[str, ...]:
    """A log line about processes that have died or were killed and replaced since; empty if there are none."""
    servers = now.servers_lost - (before.servers_lost if before else 0)
    workers = now.workers_lost - (before.workers_lost if before else 0)
    lost = [f"{count} {what}" for count, what in ((servers, "warm servers"), (workers, "workers")) if count]
    return (f"{' and '.join(lost)} of its pool were lost, and others started",) if lost else ()
