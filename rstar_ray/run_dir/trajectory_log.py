"""Readable trajectories: one JSON object per line, with text and tokens."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import groupby, islice
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rstar_ray.algorithm.update import SeenTokens
from rstar_ray.run_dir.durable import replacing, to_row
from rstar_ray.trajectory import Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, including special tokens."""
NOTHING_SEEN: Mapping[str, SeenTokens] = MappingProxyType({})
ATTEMPT = "~"
"""Separates the id of a running rollout from the number of its attempt; attempts are counted after `abandon`."""
ATTEMPT_NUMBER = re.compile(rf"{ATTEMPT}\d+$")
"""The end of such an id. A requested id ends in the number of the sibling or of the repeat."""
_MOST_TOKENS_A_CHARACTER = 4
"""Bytes of a character in UTF-8."""


def readable(
    trajectory: Trajectory, decode: Decode, seen: SeenTokens | None = None, **labels: object
) -> dict[str, Any]:
    """One trajectory with its text; `labels` (stage, step, ...) come first in the object.

    `seen`: the learner's values for its tokens, if it was trained on. Its id is the requested one, as in the ledger,
    without the number of the attempt.
    """
    summary, problem = trajectory.summary, trajectory.problem
    return {
        **labels,
        "rollout_id": ATTEMPT_NUMBER.sub("", summary.rollout_id),
        "group_id": summary.group_id,
        "problem_id": problem.id,
        "problem": problem.problem,
        "answer": problem.answer,
        "family": problem.family,
        "difficulty": problem.difficulty,
        "reward": summary.reward,
        "stop_reason": str(summary.stop_reason),
        "num_calls": summary.num_calls,
        "num_failed": summary.num_failed,
        "num_answers": summary.num_answers,
        "num_response_tokens": summary.num_response_tokens,
        "verify_s": round(summary.verify_s, 4),
        "restarts": summary.restarts,
        "judge_retries": summary.judge_retries,
        "placements": [asdict(placement) for placement in summary.placements],
        "prompt": decode(trajectory.prompt_ids.tolist()),
        "prompt_ids": trajectory.prompt_ids.tolist(),
        "turns": list(_turns(trajectory, decode, seen)),
    }


def _turns(trajectory: Trajectory, decode: Decode, seen: SeenTokens | None) -> Iterator[dict[str, Any]]:
    @cache
    def single(token_id: int) -> str:
        return decode([token_id])

    sampled_logprobs = iter(trajectory.rollout_logprobs[trajectory.loss_mask].tolist())
    versions = iter(trajectory.policy_versions[trajectory.loss_mask].tolist())
    entropies = iter(_short(seen.entropies)) if seen else None
    diffs = iter(_short(seen.logprob_diffs)) if seen else None
    for turn, (completion_ids, tool_ids) in zip(trajectory.turns, split_turns(trajectory), strict=True):
        completion, sampled_by = decode(completion_ids), list(islice(versions, turn.num_tokens))
        yield {
            "completion": completion,
            "completion_ids": completion_ids,
            "token_chars": token_chars(completion_ids, completion, single, decode),
            "logprobs": [round(logprob, 4) for logprob in islice(sampled_logprobs, turn.num_tokens)],
            "entropies": list(islice(entropies, turn.num_tokens)) if entropies else None,
            "logprob_diffs": list(islice(diffs, turn.num_tokens)) if diffs else None,
            "tool_response": decode(tool_ids) if tool_ids else None,
            "tool_ids": tool_ids,
            "outcomes": [str(result.outcome) for result in turn.tool_results],
            "num_tokens": turn.num_tokens,
            "continues": turn.continues,
            "why_new": turn.why_new,
            "policy_versions": list(dict.fromkeys(sampled_by)),
            "version_runs": [[version, len(list(run))] for version, run in groupby(sampled_by)],
            "generate_s": round(turn.generate_s, 4),
            "tool_s": round(turn.tool_s, 4),
        }


def _short(values: NDArray[np.float32]) -> list[float | None]:
    """Values with three significant digits; None for non-finite ones."""
    return [float(f"{value:.3g}") if isfinite(value) else None for value in values.tolist()]


def token_chars(token_ids: Sequence[int], text: str, single: Callable[[int], str], decode: Decode) -> list[int] | None:
    """Number of characters that each token adds to `text`. A character that several tokens encode counts at the last.

    `single` decodes one token. None where the decoded pieces do not join to the text, as with tokenizers that drop
    spaces.

    >>> token_chars([0, 1, 2], "ab c", ["a", "b ", "c"].__getitem__, None)
    [1, 2, 1]
    """
    counts: list[int] = []
    held: list[int] = []
    pieces: list[str] = []
    for token_id in token_ids:
        held.append(token_id)
        piece = single(token_id) if len(held) == 1 else decode(held)
        if piece.endswith("\ufffd") and len(held) < _MOST_TOKENS_A_CHARACTER:
            counts.append(0)
            continue
        pieces.append(piece)
        counts.append(len(piece))
        held = []
    return counts if "".join(pieces) == text else None


def split_turns(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """(completion ids, ids of the tool text after it) of every turn, by the loss mask."""
    ids, mask = trajectory.response_ids.tolist(), trajectory.loss_mask.tolist()
    turns: list[tuple[list[int], list[int]]] = []
    start = 0
    for turn in trajectory.turns:
        end = start + turn.num_tokens
        following = end
        while following < len(ids) and not mask[following]:
            following += 1
        turns.append((ids[start:end], ids[end:following]))
        start = following
    assert start == len(ids), f"{trajectory.summary.rollout_id}: its turns cover {start} of {len(ids)} tokens"
    return turns


def write_trajectories(
    path: Path,
    trajectories: Iterable[Trajectory],
    decode: Decode,
    *,
    seen: Mapping[str, SeenTokens] = NOTHING_SEEN,
    **labels: object,
) -> None:
    """Write `path` (jsonl) atomically, replacing an earlier file; `seen` by rollout id.

    One row is in memory at a time, because a large step has gigabytes of text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for one in trajectories:
            file.write(to_row(readable(one, decode, seen.get(one.summary.rollout_id), **labels)).encode())
