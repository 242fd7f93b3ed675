"""Splits a completion into text, tool calls and answer, and a tool response into its results."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from rstar_ray.report.run_record import Row

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
NOT_SHOWN = "(a result that the policy was not shown)"
_RESPONSE_OPENS, _RESPONSE_CLOSES = "<tool_response>", "</tool_response>"
_SPECIAL = re.compile(r"<\|(?:im_start\|>(?:assistant|user|system)?|im_end\|>|endoftext\|>)\n?")
_PIECES = re.compile(f"{_CALL.pattern}|{_ANSWER.pattern}|{_SPECIAL.pattern}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a trajectory; `failed`: whether the tool call failed."""

    kind: Literal["text", "code", "stdin", "broken call", "response", "answer"]
    text: str
    outcome: str = ""

    @property
    def failed(self) -> bool:
        return self.kind == "response" and self.outcome != "ok"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a completion as sampled; the text between its tags is `[inner_start, inner_end)`."""

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


def tool_answers(turn: Row) -> list[Segment]:
    """The result of each tool call of the turn, with its outcome."""
    if turn["tool_response"] is None:  # of a call that ran: the result did not fit, or the rollout ended
        return [Segment("response", NOT_SHOWN, outcome) for outcome in turn["outcomes"]]
    responses = list(_responses(turn["tool_response"])) or [_SPECIAL.sub("", turn["tool_response"])]
    outcomes = [*turn["outcomes"], *["ok"] * len(responses)]
    return [Segment("response", text, outcome) for text, outcome in zip(responses, outcomes, strict=False)]


def _responses(text: str) -> Iterator[str]:
    """The text between each pair of markers. A tool may print a marker too."""
    position = 0
    while (start := text.find(_RESPONSE_OPENS, position)) >= 0:
        start += len(_RESPONSE_OPENS)
        end = text.find(_RESPONSE_CLOSES, start)
        if end < 0:
            return
        yield text[start:end].removeprefix("\n").removesuffix("\n")
        position = end + len(_RESPONSE_CLOSES)


def call_pieces(text: str) -> list[Segment]:
    """The program and input of a well-formed call; other text unchanged."""
    try:
        call = json.loads(text)
        arguments = cast(dict[str, Any], call["arguments"])
        code, stdin = arguments["code"], arguments.get("input", "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [Segment("broken call", text.strip())]
    return [Segment("code", str(code)), *([Segment("stdin", str(stdin))] if stdin else [])]


def recovered(row: Row) -> bool:
    """Whether the final answer is correct, and a failed call was followed by a successful one."""
    outcomes = [outcome for turn in row["turns"] for outcome in turn["outcomes"]]
    failed = [position for position, outcome in enumerate(outcomes) if outcome != "ok"]
    return row["reward"] >= 1 and bool(failed) and "ok" in outcomes[failed[0] :]
