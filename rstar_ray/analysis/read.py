"""Recorded trajectories as sampled turns, from their rows in `trajectories/*.jsonl`."""

from collections.abc import Callable, Sequence
from typing import Any

from rstar_ray.analysis.zones import SampledTurn
from rstar_ray.outcome import Outcome

Row = dict[str, Any]
Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids to the text that each adds."""
CALL = ("<tool_call>", "</tool_call>")
ANSWER = ("<answer>", "</answer>")


def sampled_turns(row: Row, pieces: Pieces) -> list[SampledTurn]:
    """The turns of one trajectory."""
    turns: list[SampledTurn] = []
    told: Outcome | None = None
    for turn in row["turns"]:
        ids: list[int] = turn["completion_ids"]
        texts = pieces(ids)
        turns.append(SampledTurn(tuple(ids), tuple(_between(texts, CALL)), tuple(_between(texts, ANSWER)), told))
        outcomes = [Outcome(outcome) for outcome in turn["outcomes"]]
        told = next((outcome for outcome in outcomes if outcome.failed), outcomes[0] if outcomes else None)
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


def _between(texts: Sequence[str], tags: tuple[str, str]) -> list[bool]:
    """True at the pieces strictly between an opening tag and its closing one (or the end)."""
    opening, closing = tags
    inside: list[bool] = []
    written, opened = "", False
    for text in texts:
        written += text
        if not opened:
            inside.append(False)
            opened = written.endswith(opening)
        elif written.endswith(closing):
            inside.append(False)
            opened = False
        else:
            inside.append(True)
    return inside
