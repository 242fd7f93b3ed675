"""What a placement rule has learned that outlives a step: plain numbers, which a checkpoint can hold.

What is of one step is no part of it: who is live, what was foreseen when the step began, when was learned last.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from scheduler.expected_kv.estimate import MOST_COUNTED, Past


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedLengths:
    """Of rollouts under one pair of budgets."""

    max_response_tokens: int
    max_turns: int
    sampled_tokens: float  # by rollouts that have ended, ...
    response_tokens: float  # ... and what their responses held, tools' text included
    past: Past

    def __post_init__(self) -> None:
        _refuse_outside(self, "max_response_tokens", "max_turns", "sampled_tokens", least=1)
        _refuse_outside(self, "response_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCounts:
    """Since a run's start: what moves may cost follows from it."""

    generated_tokens: int
    turns: int
    moved_tokens: int  # contexts computed again because of moves
    preempted_tokens: int  # contexts that engines have thrown away

    def __post_init__(self) -> None:
        _refuse_outside(self, "generated_tokens", "turns", "moved_tokens", "preempted_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """All of it."""

    lengths: tuple[LearnedLengths, ...]
    raised_z: float  # deviations that preemptions have added to what is left free
    admissions: int  # since a run's start: ties rotate with them
    moves: MoveCounts

    def __post_init__(self) -> None:
        _refuse_outside(self, "raised_z", "admissions")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Any) -> "Learned":
        """Raises `ValueError` with the name of what is missing, unknown or nonsense."""
        found = _named(saved, cls)
        moves = _named(found["moves"], MoveCounts)
        return cls(
            lengths=tuple(_lengths(one) for one in _listed(found, "lengths")),
            raised_z=_number(found["raised_z"], "raised_z"),
            admissions=_whole(found, "admissions"),
            moves=MoveCounts(**{name: _whole(moves, name) for name in moves}),
        )


def _lengths(saved: Any) -> LearnedLengths:
    found = _named(saved, LearnedLengths)
    return LearnedLengths(
        max_response_tokens=_whole(found, "max_response_tokens"),
        max_turns=_whole(found, "max_turns"),
        sampled_tokens=_number(found["sampled_tokens"], "sampled_tokens"),
        response_tokens=_number(found["response_tokens"], "response_tokens"),
        past=_past(found["past"]),
    )


def _past(saved: Any) -> Past:
    found = _named(saved, Past)
    return Past(
        deaths_B=tuple(_number(count, "deaths_B") for count in _listed(found, "deaths_B")),
        tokens_B=tuple(_number(count, "tokens_B") for count in _listed(found, "tokens_B")),
        alikeness=_number(found["alikeness"], "alikeness"),
        fit_at=_number(found["fit_at"], "fit_at"),
    )


def _named(saved: Any, record: Any) -> Mapping[str, Any]:
    """An object that has the names of this record and no others: a newer one may mean something else by them."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"{saved!r:.40} stands where an object with names should")
    names = {field.name for field in fields(record)}
    for name in sorted(names.symmetric_difference(saved)):
        raise ValueError(f"{name} is {'missing' if name in names else 'unknown'}")
    return saved


def _listed(found: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(found[name], list | tuple):
        raise ValueError(f"{name} is no list")
    return [*found[name]]


def _whole(found: Mapping[str, Any], name: str) -> int:
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r:.40}, no whole number")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} has {value!r:.40}, no number")
    return value


def _refuse_outside(record: Any, *names: str, least: float = 0) -> None:
    for name in names:
        value = getattr(record, name)
        if not least <= value <= MOST_COUNTED:  # refuses NaN as well
            raise ValueError(f"{name} is {value}, not from {least} to {MOST_COUNTED:.0f}")
