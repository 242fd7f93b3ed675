"""Recorded trajectories as sampled turns, from their rows in `trajectories/*.jsonl`."""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

from examples.entropy.zones import SampledTurn
from rstar_ray.chat.call_syntax import HERMES, CallSyntax, LlamaJson, Marked, Mistral
from rstar_ray.outcome import Outcome

Row = dict[str, Any]
Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids to the text that each adds."""
ANSWER = ("<answer>", "</answer>")
MISTRAL_OPENS, LLAMA_TAG = "[TOOL_CALLS]", "<|python_tag|>"
Span = tuple[int, int]
"""Characters [start, end) of a turn's text."""


def sampled_turns(
    row: Row, pieces: Pieces, *, syntax: CallSyntax | None = HERMES, stops: Collection[int] = ()
) -> list[SampledTurn]:
    """The turns of one trajectory.

    `syntax` says where calls are written; without one no token counts as part of a call. `stops` are the tokens that
    end a turn: they belong to no call.
    """
    turns: list[SampledTurn] = []
    answered: Outcome | None = None
    for turn in row["turns"]:
        ids: list[int] = turn["completion_ids"]
        texts = ["" if token_id in stops else text for token_id, text in zip(ids, pieces(ids), strict=True)]
        text = "".join(texts)
        calls = _call_spans(text, syntax) if syntax else []
        in_call, in_answer = _inside(texts, calls), _inside(texts, _spans_between(text, *ANSWER))
        turns.append(SampledTurn(tuple(ids), tuple(in_call), tuple(in_answer), answered))
        outcomes = [Outcome(outcome) for outcome in turn["outcomes"]]
        answered = next((outcome for outcome in outcomes if outcome.failed), outcomes[0] if outcomes else None)
    return turns


def whole(row: Row) -> tuple[list[int], list[bool]]:
    """All token ids of a trajectory [L], prompt and tools' answers too, and which of them were sampled [L]."""
    ids: list[int] = list(row["prompt_ids"])
    sampled = [False] * len(ids)
    for turn in row["turns"]:
        for part, is_sampled in ((turn["completion_ids"], True), (turn["tool_ids"], False)):
            ids += part
            sampled += [is_sampled] * len(part)
    return ids, sampled


def _call_spans(text: str, syntax: CallSyntax) -> list[Span]:
    """What stands between the markers of each call; without a closing marker, all that follows."""
    if isinstance(syntax, Marked):
        return _spans_between(text, syntax.opens, syntax.closes)
    if isinstance(syntax, Mistral):
        return _spans_between(text, MISTRAL_OPENS, MISTRAL_OPENS, reopens=True)
    if isinstance(syntax, LlamaJson) and syntax.read(text):
        return [(len(text) - len(text.lstrip().removeprefix(LLAMA_TAG)), len(text))]
    return []


def _spans_between(text: str, opens: str, closes: str, *, reopens: bool = False) -> list[Span]:
    """What stands between each opening tag and the next closing one, or the end of the text.

    `reopens`: a closing tag is the opening tag of the next span.
    """
    spans: list[Span] = []
    position = text.find(opens)
    while position >= 0:
        start = position + len(opens)
        end = text.find(closes, start)
        if end < 0:
            return [*spans, (start, len(text))]
        spans.append((start, end))
        position = text.find(opens, end if reopens else end + len(closes))
    return spans


def _inside(texts: Sequence[str], spans: Sequence[Span]) -> list[bool]:
    """True at each token that has a character in one of the spans, by its position in the joined text.

    A tag may be spelled by several tokens, and a token may hold the end of a tag and what follows it, as those of
    byte-level BPE do.
    """
    ends = pairwise(accumulate(map(len, texts), initial=0))
    return [any(begin < span_end and end > start for start, span_end in spans) for begin, end in ends]
