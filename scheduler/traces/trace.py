"""Traces: the lengths and times of rollouts, in a file with one per line."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rstar_ray.trajectory import StopReason
from scheduler.json_records import read_record

LONGEST_TOOL_S = 1e9  # so that sums of times stay finite
MOST_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One completion and the tool's answer to it, which has zero tokens and seconds if no tool was called."""

    completion_tokens: int
    tool_tokens: int = 0
    tool_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_range(self, "completion_tokens", 1, MOST_TOKENS)
        _check_range(self, "tool_tokens", 0, MOST_TOKENS)
        _check_range(self, "tool_seconds", 0, LONGEST_TOOL_S)


@dataclass(frozen=True, slots=True)
class TraceRollout:
    """A whole rollout; the simulator's engines may read it, a placement rule must not."""

    group: str
    prompt_tokens: int
    turns: tuple[TraceTurn, ...]

    def __post_init__(self) -> None:
        if not self.group or not self.turns:
            raise ValueError(f"'{'turns' if self.group else 'group'}' is empty")
        _check_range(self, "prompt_tokens", 1, MOST_TOKENS)

    @property
    def generated_tokens(self) -> int:
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def response_tokens(self) -> int:
        """Everything after the prompt; the last turn's tool text is never appended."""
        return self.generated_tokens + sum(turn.tool_tokens for turn in self.turns[:-1])


def _check_range(record: TraceTurn | TraceRollout, name: str, least: float, most: float) -> None:
    if not least <= getattr(record, name) <= most:  # refuses NaN as well
        raise ValueError(f"{name!r} is {getattr(record, name)}, not from {least:g} to {most:g}")


def cut(rollout: TraceRollout, max_response_tokens: int, max_turns: int) -> TraceRollout:
    """Apply the agent loop's limits to a rollout: tool text that would overflow is not appended."""
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
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps(asdict(rollout), separators=(",", ":")) + "\n")


def read_trace(path: Path) -> list[TraceRollout]:
    """The rollouts of a trace, or of a step that a run recorded (RUN/trajectories/*.jsonl).

    Raises `ValueError` with file, line and field for a missing, negative or mistyped value, and for siblings with
    different prompts.
    """
    rollouts: list[TraceRollout] = []
    prompts: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if isinstance(row, dict) and "prompt_ids" in row:
                    if row.get("turns") == []:  # an agent that ended without a request: it used no engine
                        continue
                    row = _lengths(row)
                rollout = read_record(TraceRollout, row, allow_unknown=True)
                _check_prompt(rollout, prompts)
                rollouts.append(rollout)
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
                raise ValueError(f"{path}:{number}: {error}") from error
    if not rollouts:
        raise ValueError(f"{path}: the trace is empty")
    return rollouts


def _lengths(row: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded trajectory as a row of a trace. Raises `ValueError` where it is malformed.

    An agent may give each sibling another prompt; only those of equal length become one group.
    """
    try:
        turns = [
            {
                "completion_tokens": turn["num_tokens"],
                "tool_tokens": len(turn["tool_ids"]),
                "tool_seconds": turn["tool_s"],
            }
            for turn in row["turns"]
        ]
        prompt_tokens = len(row["prompt_ids"])
        return {"group": f"{row['group_id']}:{prompt_tokens}", "prompt_tokens": prompt_tokens, "turns": turns}
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a recorded trajectory: {error!r}") from error


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
            "siblings share one prompt; give rollouts of other prompts a separate group"
        )
