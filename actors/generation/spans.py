"""What a rollout did and when, on one replica."""

from dataclasses import dataclass
from enum import StrEnum


class Activity(StrEnum):
    """What a rollout does in a span."""

    QUEUED = "queued"  # admitted, but waiting inside the engine
    GENERATE = "generate"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Span:
    """One rollout, one activity, on one replica."""

    replica_id: str
    rollout_id: str
    activity: Activity
    start_s: float
    end_s: float
