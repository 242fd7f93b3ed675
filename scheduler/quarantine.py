"""Detects impossible reports; a replica that sends one gets no more work until it registers again."""

from scheduler.records import ReplicaLoad, RolloutLoad, TurnReport
from scheduler.state import Replica


def impossible_load(replica: Replica, load: ReplicaLoad) -> str | None:
    """Why this report of an engine is impossible, or None."""
    if not 0 <= load.kv_used_tokens <= replica.kv_capacity_tokens:  # true for NaN too
        return f"reports {load.kv_used_tokens} KV tokens in use of {replica.kv_capacity_tokens}"
    if min(load.running, load.waiting) < 0:
        return f"reports a negative count: {load}"
    if load.steps < replica.load.steps:
        return f"reports {load.steps} steps after {replica.load.steps}"
    if load.preemptions < replica.load.preemptions:
        return f"reports {load.preemptions} preemptions after {replica.load.preemptions}"
    return None


def impossible_lengths(load: RolloutLoad, report: TurnReport) -> str | None:
    """Why a rollout with this load cannot have the reported lengths, or None."""
    if report.context_tokens > load.worst_case_tokens:
        most = load.worst_case_tokens
        return f"reports {report.context_tokens} tokens of rollout {load.rollout_id!r}, of at most {most}"
    if report.generated_tokens > load.max_response_tokens:
        return (
            f"reports {report.generated_tokens} generated tokens of rollout {load.rollout_id!r}, "
            f"of at most {load.max_response_tokens}"
        )
    if min(report.context_tokens, report.generated_tokens, report.turn) < 0:
        return f"reports a negative count: {report}"
    return None
