"""Traces: what rollouts turned out to be, one a line of a file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rstar_ray.trajectory import StopReason

LONGEST_TOOL_S = 1e9  # times and sums of what a trace holds stay finite
MOST_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One completion, and the tool's answer to it; both zero tokens and seconds where no tool was called."""

    completion_tokens: int
    tool_tokens: int = 0
    tool_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TraceRollout:
    """A whole rollout; only the simulator's engines may read it, never a rule."""

    group: str
    prompt_tokens: int
    turns: tuple[TraceTurn, ...]

    @property
    def generated_tokens(self) -> int:
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def response_tokens(self) -> int:
        """Everything after the prompt: the last turn's tool text is never appended."""
        return self.generated_tokens + sum(turn.tool_tokens for turn in self.turns[:-1])


def cut(rollout: TraceRollout, max_response_tokens: int, max_turns: int) -> TraceRollout:
    """The rollout as the agent loop's limits leave it: tool text that would overflow is not appended."""
    used = 0
    turns: list[TraceTurn] = []
    for turn in rollout.turns[:max_turns]:
        room = max_response_tokens - used
        if turn.completion_tokens >= room:
            turns.append(TraceTurn(room))
            break
        turns.append(turn)
        used += turn.completion_tokens + turn.tool_tokens
        if used >= max_response_tokens:
            break
    return replace(rollout, turns=tuple(turns))


def stop_reason(rollout: TraceRollout, max_response_tokens: int, max_turns: int) -> StopReason:
    """Why the agent loop would have ended a rollout that was cut to these limits."""
    if rollout.response_tokens >= max_response_tokens:
        return StopReason.TRUNCATED
    if len(rollout.turns) >= max_turns:
        return StopReason.MAX_TURNS
    unread = rollout.turns[-1].tool_tokens  # a tool's text that would have overflowed the budget
    overflowed = unread > 0 and rollout.response_tokens + unread >= max_response_tokens
    return StopReason.TRUNCATED if overflowed else StopReason.ANSWERED


# -- files ----------------------------------------------------------------------------------------------------------
def write_trace(path: Path, rollouts: Iterable[TraceRollout]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps(trace_row(rollout), separators=(",", ":")) + "\n")


def trace_row(rollout: TraceRollout) -> dict[str, Any]:
    return {
        "group": rollout.group,
        "prompt_tokens": rollout.prompt_tokens,
        "turns": [
            {
                "completion_tokens": turn.completion_tokens,
                "tool_tokens": turn.tool_tokens,
                "tool_seconds": turn.tool_seconds,
            }
            for turn in rollout.turns
        ],
    }


def read_trace(path: Path) -> list[TraceRollout]:
    """Raises `ValueError` naming file, line and field for anything missing, negative or of another type, and for
    siblings with different prompts.
    """
    rollouts: list[TraceRollout] = []
    prompts: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rollout = _parse(json.loads(line))
                _check_prompt(rollout, prompts)
                rollouts.append(rollout)
            except (ValueError, TypeError, RecursionError) as error:  # no UTF-8, no JSON, or nested beyond reason
                raise ValueError(f"{path}:{number}: {error}") from error
    if not rollouts:
        raise ValueError(f"{path}: the trace is empty")
    return rollouts


def check_siblings(rollouts: Iterable[TraceRollout]) -> None:
    """Siblings share their prompt, and its KV. Raises `ValueError` naming a group that does not."""
    prompts: dict[str, int] = {}
    for rollout in rollouts:
        _check_prompt(rollout, prompts)


def _check_prompt(rollout: TraceRollout, prompts: dict[str, int]) -> None:
    known = prompts.setdefault(rollout.group, rollout.prompt_tokens)
    if known != rollout.prompt_tokens:
        raise ValueError(
            f"'prompt_tokens' is {rollout.prompt_tokens}, but group {rollout.group!r} has a prompt of {known}: "
            "siblings share one prompt; give rollouts of other prompts a group of their own"
        )


def _parse(row: Any) -> TraceRollout:
    row = _object(row, "a rollout")
    group = row.get("group")
    if not isinstance(group, str) or not group:
        raise ValueError("'group' is missing or not a non-empty string")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError("'turns' is missing or not a non-empty list")
    return TraceRollout(
        group, _count(row, "prompt_tokens", 1), tuple(_parse_turn(turn) for turn in cast(Sequence[Any], turns))
    )


def _parse_turn(turn: Any) -> TraceTurn:
    turn = _object(turn, "a turn")
    seconds = turn.get("tool_seconds")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= LONGEST_TOOL_S:
        raise ValueError(f"'tool_seconds' is {seconds!r:.40}, not a number between 0 and {LONGEST_TOOL_S:g}")
    return TraceTurn(_count(turn, "completion_tokens", 1), _count(turn, "tool_tokens", 0), float(seconds))


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    return cast(dict[str, Any], value)


def _count(row: dict[str, Any], name: str, least: int) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_TOKENS:
        raise ValueError(f"{name!r} is {value!r:.40}, not a whole number between {least} and {MOST_TOKENS}")
    return value
