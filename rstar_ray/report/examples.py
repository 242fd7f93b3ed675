"""Trajectories for reading: what a completion is made of, and which ones to show."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from rstar_ray.report.record import Row, RunRecord, TrajectoryFile, trajectory_files

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_RESPONSE_OPENS, _RESPONSE_CLOSES = "<tool_response>", "</tool_response>"
_SPECIAL = re.compile(r"<\|(?:im_start\|>(?:assistant|user|system)?|im_end\|>|endoftext\|>)\n?")
_PIECES = re.compile(f"{_CALL.pattern}|{_ANSWER.pattern}|{_SPECIAL.pattern}", re.DOTALL)
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


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a completion as it was sampled; what lies between its tags is `[inner_start, inner_end)`."""

    kind: Literal["text", "call", "answer", "special"]
    start: int
    end: int
    inner_start: int
    inner_end: int


def spans(completion: str) -> list[Span]:
    """The whole completion, piece by piece in its order."""
    found: list[Span] = []
    position = 0
    for match in _PIECES.finditer(completion):
        if match.start() > position:
            found.append(Span("text", position, match.start(), position, match.start()))
        kind = "call" if match[1] is not None else "answer" if match[2] is not None else "special"
        inner = match.span({"call": 1, "answer": 2, "special": 0}[kind])
        found.append(Span(kind, match.start(), match.end(), *inner))
        position = match.end()
    if position < len(completion):
        found.append(Span("text", position, len(completion), position, len(completion)))
    return found


def segments(turn: Row) -> list[Segment]:
    """A turn as thoughts, programs, answers, and what the tool said to each program."""
    found: list[Segment] = []
    completion: str = turn["completion"]
    for span in spans(completion):
        inner = completion[span.inner_start : span.inner_end].strip()
        if span.kind == "text" and inner:
            found.append(Segment("text", _short(inner)))
        elif span.kind == "answer":
            found.append(Segment("answer", inner))
        elif span.kind == "call":
            found += [Segment(piece.kind, _short(piece.text)) for piece in call_pieces(inner)]
    return found + [Segment(said.kind, _short(said.text), said.outcome) for said in tool_answers(turn)]


def tool_answers(turn: Row) -> list[Segment]:
    """What the tool said to each call of the turn, with how the call ended."""
    if turn["tool_response"] is None:
        return []
    responses = list(_responses(turn["tool_response"])) or [_SPECIAL.sub("", turn["tool_response"])]
    outcomes = [*turn["outcomes"], *["ok"] * len(responses)]
    return [Segment("response", text, outcome) for text, outcome in zip(responses, outcomes, strict=False)]


def _responses(text: str) -> Iterator[str]:
    """What stands between each pair of markers; a tool may print either of them."""
    position = 0
    while (start := text.find(_RESPONSE_OPENS, position)) >= 0:
        start += len(_RESPONSE_OPENS)
        end = text.find(_RESPONSE_CLOSES, start)
        if end < 0:
            return
        yield text[start:end].removeprefix("\n").removesuffix("\n")
        position = end + len(_RESPONSE_CLOSES)


def call_pieces(text: str) -> list[Segment]:
    """A readable call as its program and input; anything else as it stands."""
    try:
        call = json.loads(text)
        arguments = cast(dict[str, Any], call["arguments"])
        code, stdin = arguments["code"], arguments.get("input", "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [Segment("broken call", text.strip())]
    return [Segment("code", str(code)), *([Segment("stdin", str(stdin))] if stdin else [])]


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
