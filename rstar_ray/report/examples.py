"""Trajectories for reading: what a completion is made of, and which ones to show."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from rstar_ray.report.record import Row, RunRecord, TrajectoryFile, trajectory_files

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_SPECIAL = re.compile(r"<\|(?:im_start\|>(?:assistant|user|system)?|im_end\|>|endoftext\|>)\n?")
_MAX_CHARS = 6_000


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a trajectory; `failed` is the tool's verdict on a response."""

    kind: Literal["text", "code", "stdin", "broken call", "response", "answer"]
    text: str
    outcome: str = ""

    @property
    def failed(self) -> bool:
        return self.kind == "response" and self.outcome != "ok"


@dataclass(frozen=True, slots=True)
class Example:
    """One trajectory chosen for the report, and why."""

    title: str
    row: Row


def segments(turn: Row) -> list[Segment]:
    """A turn as thoughts, programs, answers, and what the tool said to each program."""
    found: list[Segment] = []
    completion, position = _SPECIAL.sub("", turn["completion"]), 0
    for match in re.finditer(f"{_CALL.pattern}|{_ANSWER.pattern}", completion, re.DOTALL):
        found += _text(completion[position : match.start()])
        found += _call(match[1]) if match[1] is not None else [Segment("answer", match[2].strip())]
        position = match.end()
    found += _text(completion[position:])
    if turn["tool_response"] is not None:
        responses = _RESPONSE.findall(turn["tool_response"]) or [_SPECIAL.sub("", turn["tool_response"])]
        outcomes = [*turn["outcomes"], *["ok"] * len(responses)]
        found += [
            Segment("response", _short(text), outcome) for text, outcome in zip(responses, outcomes, strict=False)
        ]
    return found


def _text(text: str) -> list[Segment]:
    return [Segment("text", _short(text.strip()))] if text.strip() else []


def _call(text: str) -> list[Segment]:
    """A readable call as its program and input; anything else as it stands."""
    try:
        call = json.loads(text)
        arguments = cast(dict[str, Any], call["arguments"])
        code, stdin = arguments["code"], arguments.get("input", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return [Segment("broken call", _short(text.strip()))]
    return [Segment("code", _short(str(code))), *([Segment("stdin", _short(str(stdin)))] if stdin else [])]


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}\n… {len(text) - _MAX_CHARS:,} characters more"


def recovered(row: Row) -> bool:
    """Right in the end, although a call had failed before one that did not."""
    outcomes = [outcome for turn in row["turns"] for outcome in turn["outcomes"]]
    failed = [position for position, outcome in enumerate(outcomes) if outcome != "ok"]
    return row["reward"] >= 1 and bool(failed) and "ok" in outcomes[failed[0] :]


def examples(run: RunRecord) -> list[Example]:
    """One before RL, one at the end (of the same problem where there is one), one that recovers from a tool error."""
    files = [file for file in trajectory_files(run) if file.problem_set in ("", "held-out")]
    if not files:
        return []
    compared = [file for file in files if file.problem_set] or files
    first, last = compared[0], compared[-1]
    before, after = first.rows(), last.rows() if last != first else []
    pairs = [(a, b) for a in _wrong(before) for b in _right(after) if _same_problem(a, b)]
    wrong_then_right = next((pair for pair in pairs if recovered(pair[1])), next(iter(pairs), None))
    chosen: list[Example] = []
    opening = wrong_then_right[0] if wrong_then_right else next(iter(_wrong(before) or before), None)
    ending = wrong_then_right[1] if wrong_then_right else next(iter(_right(after) or after), None)
    if opening is not None:
        chosen.append(_example("Before RL" if first.rl_step == 0 else "Early in RL", first, opening))
    if ending is not None:
        chosen.append(_example("At the end", last, ending))
    for file in files[::-1]:
        mended = next(filter(recovered, file.rows()), None)
        if mended is not None:
            chosen.append(_example("An error, and the way out of it", file, mended))
            break
    return chosen


def viewer_rows(run: RunRecord, *, max_files: int = 8, per_file: int = 24) -> list[tuple[TrajectoryFile, list[Row]]]:
    """Trajectories for the page: files spread over the run, first and last among them, some of each."""
    files = trajectory_files(run)
    if len(files) > max_files:
        files = [files[round(i * (len(files) - 1) / (max_files - 1))] for i in range(max_files)]
    return [(file, _spread(file.rows(), per_file)) for file in files]


def _spread(rows: list[Row], count: int) -> list[Row]:
    return rows if len(rows) <= count else [rows[i * len(rows) // count] for i in range(count)]


def _example(title: str, file: TrajectoryFile, row: Row) -> Example:
    return Example(f"{title} ({file.title})", row)


def _same_problem(one: Row, other: Row) -> bool:
    return one["problem_id"] == other["problem_id"]


def _wrong(rows: Iterable[Row]) -> list[Row]:
    """Those that used the tool first."""
    return sorted((row for row in rows if row["reward"] < 1), key=lambda row: row["num_calls"] == 0)


def _right(rows: Iterable[Row]) -> list[Row]:
    """Those that used the tool, and without an error, first."""
    right = (row for row in rows if row["reward"] >= 1)
    return sorted(right, key=lambda row: (row["num_calls"] == 0, row["num_failed"]))
