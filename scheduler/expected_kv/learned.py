"""The state of `expected_kv` that outlives a step: plain numbers for a checkpoint.

The state of one step is not included: live rollouts, and the demand expected when the step began.
"""

from dataclasses import asdict, dataclass
from typing import Any

from scheduler.expected_kv.estimate import MOST_COUNTED, Past
from scheduler.json_records import read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedLengths:
    """The statistics of rollouts under one pair of budgets."""

    max_response_tokens: int
    max_turns: int
    sampled_tokens: float  # by rollouts that have ended, ...
    response_tokens: float  # ... and tokens of their responses, tools' text included
    past: Past

    def __post_init__(self) -> None:
        _check_range(self, "max_response_tokens", "max_turns", "sampled_tokens", least=1)
        _check_range(self, "response_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCounts:
    """Counts since the run's start, which limit the cost of moves."""

    generated_tokens: int
    turns: int
    moved_tokens: int  # contexts recomputed because of moves
    preempted_tokens: int  # contexts that engines have discarded

    def __post_init__(self) -> None:
        _check_range(self, "generated_tokens", "turns", "moved_tokens", "preempted_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The whole state."""

    lengths: tuple[LearnedLengths, ...]
    admissions: int  # since the run's start: ties rotate with them
    moves: MoveCounts

    def __post_init__(self) -> None:
        _check_range(self, "admissions")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Any) -> "Learned":
        """Raises `ValueError` with the name of the field that is missing, unknown or out of range."""
        return read_record(cls, saved)


def _check_range(record: Any, *names: str, least: float = 0) -> None:
    for name in names:
        value = getattr(record, name)
        if not least <= value <= MOST_COUNTED:  # refuses NaN as well
            raise ValueError(f"{name!r} is {value}, not from {least} to {MOST_COUNTED:.0f}")
