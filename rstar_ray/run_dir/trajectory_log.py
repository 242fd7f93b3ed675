"""Trajectories as people and programs read them: one JSON object per line, the text and the tokens behind it."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rstar_ray.run_dir.durable import to_row, write_text
from rstar_ray.trajectory import Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids to text with the special tokens left in."""


def readable(trajectory: Trajectory, decode: Decode, **labels: object) -> dict[str, Any]:
    """One trajectory with its text; `labels` (stage, step, ...) come first in the object."""
    summary, problem = trajectory.summary, trajectory.problem
    return {
        **labels,
        "rollout_id": summary.rollout_id,
        "problem_id": problem.id,
        "problem": problem.problem,
        "answer": problem.answer,
        "family": problem.family,
        "difficulty": problem.difficulty,
        "reward": summary.reward,
        "stop_reason": str(summary.stop_reason),
        "num_calls": summary.num_calls,
        "num_failed": summary.num_failed,
        "num_response_tokens": summary.num_response_tokens,
        "prompt": decode(trajectory.prompt_ids.tolist()),
        "prompt_ids": trajectory.prompt_ids.tolist(),
        "turns": [
            {
                "completion": decode(completion_ids),
                "completion_ids": completion_ids,
                "tool_response": decode(tool_ids) if tool_ids else None,
                "tool_ids": tool_ids,
                "outcomes": [str(result.outcome) for result in turn.tool_results],
                "num_tokens": turn.num_tokens,
                "policy_versions": list(dict.fromkeys(versions)),
                "generate_s": round(turn.generate_s, 4),
                "tool_s": round(turn.tool_s, 4),
            }
            for turn, versions, (completion_ids, tool_ids) in zip(
                trajectory.turns, _versions(trajectory), split_turns(trajectory), strict=True
            )
        ],
    }


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


def _versions(trajectory: Trajectory) -> list[list[int]]:
    """The weights that sampled each turn's tokens, token by token."""
    sampled = iter(trajectory.policy_versions[trajectory.loss_mask].tolist())
    return [list(islice(sampled, turn.num_tokens)) for turn in trajectory.turns]


def write_trajectories(path: Path, trajectories: Iterable[Trajectory], decode: Decode, **labels: object) -> None:
    """Write `path` (jsonl) whole, in place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(to_row(readable(trajectory, decode, **labels)) for trajectory in trajectories))
