"""Texts of recorded trajectories, compressed group by group, up to the page's size limit.

A group's texts and its token figures are two blocks, so that the texts of many groups fit. Groups enter in rounds: the
first of every file, then the second of every file, ...; first their texts, then, while there is room, their figures.
"""

import base64
import html
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10, sqrt
from typing import Any

from rstar_ray.report.run_record import Row
from rstar_ray.report.segments import call_pieces, spans, tool_answers
from rstar_ray.report.trajectory_rows import Siblings, StepStatuses, reason

MOST_TEXT_BYTES = 14 * 2**20
"""Size limit of all texts in the page, in base64."""
MOST_BODY_BYTES = 17 * 2**20
"""Size limit of texts and token figures together."""
FIRST = 93
"""A token's number n is the character FIRST + n: above the backslash, so that JSON needs no escape."""
SCALE = 64.0
"""A log-prob of -x, and an entropy of x, is the number SCALE * sqrt(x): fine near 0, where most are."""
MOST = 320
"""For a log-prob: this value or less. For all other figures: unknown."""
DECADES, LEAST_DECADE, NEGATIVE = 16, 8, 160
"""A difference of 10**x is the number DECADES * (x + LEAST_DECADE), a negative one NEGATIVE more; 0 is 0."""


@dataclass(frozen=True, slots=True)
class Body:
    """One group's blocks, deflated."""

    group: int  # as the rows count
    file: int
    file_name: str
    place: int  # among the groups of its file
    texts: bytes
    figures: bytes  # empty where the records have none


def texts_of(siblings: Siblings, known: StepStatuses, rule: str) -> list[dict[str, Any]]:
    """One object for each sibling; a prompt equal to the first sibling's is empty."""
    return [
        {
            "id": row["rollout_id"],
            "why": reason(row, siblings.rows, known, rule),
            "prompt": row["prompt"] if sibling == 0 or row["prompt"] != siblings.rows[0]["prompt"] else "",
            "restarts": row["restarts"],
            "judge_retries": row["judge_retries"],
            "verify_s": row["verify_s"],
            "placements": row["placements"],
            "turns": [_turn_texts(row["turns"], number) for number in range(len(row["turns"]))],
        }
        for sibling, row in enumerate(siblings.rows)
    ]


def _turn_texts(turns: Sequence[Row], number: int) -> dict[str, Any]:
    """Tokens before a completion belong to the turn before it, as tool results, unless it continues another turn."""
    turn, completion = turns[number], turns[number]["completion"]
    elsewhere = number + 1 < len(turns) and turns[number + 1].get("continues") is not None
    line = {}
    if turn.get("continues") is not None:
        before = turns[number - 1]["tool_response"] if number else ""
        line = {"continues": turn["continues"], "why_new": turn.get("why_new", ""), "messages": before or ""}
    found = spans(completion)
    results = [] if elsewhere else [[result.text, result.outcome] for result in tool_answers(turn)]
    if number + 1 == len(turns) and not results and any(span.kind == "call" for span in found):
        results = [["(the rollout ended here)", "no result"]]  # an agent may have run the call
    return {
        "completion": completion,
        "spans": [
            [span.kind, span.start, span.end, span.inner_start, span.inner_end, *_read(completion, span)]
            for span in found
        ],
        "results": results,
        "tokens": turn["num_tokens"],
        "generate_s": turn["generate_s"],
        "tool_s": turn["tool_s"],
        "versions": turn["version_runs"],
        **line,
    }


def _read(completion: str, span: Any) -> list[list[list[str]]]:
    """A tool call's program and input; empty for other spans."""
    if span.kind != "call":
        return []
    return [[[piece.kind, piece.text] for piece in call_pieces(completion[span.inner_start : span.inner_end])]]


def figures_of(siblings: Siblings) -> list[list[list[str]]]:
    """Four strings for each sibling and turn, with one character per token.

    They are: characters that it adds to the text, its log-prob, and, of those trained on, entropy and the learner's
    log-prob less the engine's. Empty where no sibling has any.
    """
    of_rows = [[_turn_figures(turn) for turn in row["turns"]] for row in siblings.rows]
    return of_rows if any(figures[0] for turns in of_rows for figures in turns) else []


def _turn_figures(turn: Row) -> list[str]:
    if not turn["token_chars"]:
        return ["", "", "", ""]
    return [
        _letters(turn["token_chars"]),
        _letters(map(_small, turn["logprobs"])),
        _letters(MOST if entropy is None else _small(-entropy) for entropy in turn["entropies"] or ()),
        _letters(map(_decade, turn["logprob_diffs"] or ())),
    ]


def _letters(numbers: Iterable[int]) -> str:
    return "".join([chr(FIRST + number) for number in numbers])


def _small(logprob: float | None) -> int:
    return MOST if logprob is None else min(MOST, round(SCALE * sqrt(max(0.0, -logprob))))


def _decade(difference: float | None) -> int:
    if difference is None or not difference:
        return MOST if difference is None else 0
    decade = round(DECADES * (log10(abs(difference)) + LEAST_DECADE))
    return min(max(1, decade), NEGATIVE - 1) + (NEGATIVE if difference < 0 else 0)


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8; an unpaired surrogate, which UTF-8 cannot encode, stays a JSON escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def deflated(value: object) -> bytes:
    return zlib.compress(json_bytes(value), 6)


def text_block(siblings: Siblings, known: StepStatuses, rule: str) -> bytes:
    return deflated(texts_of(siblings, known, rule))


def figure_block(siblings: Siblings) -> bytes:
    figures = figures_of(siblings)
    return deflated(figures) if figures else b""


def chosen(
    bodies: Sequence[Body], most_text_bytes: int = MOST_TEXT_BYTES, most_bytes: int = MOST_BODY_BYTES
) -> tuple[list[Body], set[int]]:
    """Groups whose texts are in the page, and those of them whose token figures are also in it."""
    in_rounds = sorted(bodies, key=lambda body: (body.place, -body.file))
    held: list[Body] = []
    size = 0
    for body in in_rounds:
        if size + _in_base64(body.texts) > most_text_bytes:
            break
        size += _in_base64(body.texts)
        held.append(body)
    with_figures: set[int] = set()
    for body in held:
        size += _in_base64(body.figures)
        if size > most_bytes:
            break
        if body.figures:
            with_figures.add(body.group)
    return held, with_figures


def _in_base64(data: bytes) -> int:
    return (len(data) + 2) // 3 * 4 + 64  # and the tag around it


def blocks(held: Sequence[Body], with_figures: set[int]) -> str:
    """Script elements that a browser does not execute: `texts/<file>/<place>` and `figures/<file>/<place>`."""
    parts: list[str] = []
    for body in held:
        parts.append(block(f"texts/{body.file_name}/{body.place}", body.texts))
        if body.group in with_figures:
            parts.append(block(f"figures/{body.file_name}/{body.place}", body.figures))
    return "\n".join(parts)


def block(name: str, data: bytes) -> str:
    return f'<script type="text/plain" id="{html.escape(name)}">{base64.b64encode(data).decode()}</script>'
