"""Conversion of recorded trajectories to `Trajectory`: tokens, log-probs, versions, and the fields for resampling."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rstar_ray.errors import ConfigError
from rstar_ray.lines import line_sizes
from rstar_ray.outcome import Outcome
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.trajectory import Problem, StopReason, Trajectory, TrajectorySummary, Turn


def recorded_trajectories(path: Path) -> list[Trajectory]:
    """Trajectories in the order of the file. Raises `ConfigError` where it does not exist, or lacks a field that a
    learner needs."""
    if not path.exists():
        raise ConfigError(
            "--step", f"{path} does not exist", "see trajectories/ in the run directory for recorded steps"
        )
    rows, hint = read_rows(path), "record the step with this version of rstar_ray"
    try:
        return [recorded_trajectory(row) for row in rows]
    except KeyError as lacks:
        raise ConfigError("--step", f"{path} has no {lacks.args[0]}", hint) from lacks
    except (TypeError, ValueError) as other:
        raise ConfigError("--step", f"{path} has a malformed row ({other})", hint) from other


def recorded_trajectory(row: dict[str, Any]) -> Trajectory:
    """One row of a trajectory file; log-probs have the file's precision. Raises `KeyError` for a missing field."""
    turns = row["turns"]
    response = [part for turn in turns for part in (turn["completion_ids"], turn["tool_ids"])]
    mask = [sampled for turn in turns for sampled in (True, False) for _ in turn[_IDS[sampled]]]
    logprobs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
    sampled = np.array(mask, np.bool_)
    logprobs[sampled] = [logprob for turn in turns for logprob in turn["logprobs"]]
    versions[sampled] = [version for turn in turns for version, run in turn["version_runs"] for _ in range(run)]
    kept = tuple(
        Turn(num_tokens=turn["num_tokens"], continues=turn.get("continues"), why_new=turn.get("why_new", ""))
        for turn in turns
    )
    lines = line_sizes(kept, sampled, len(row["prompt_ids"]))
    return Trajectory(
        summary=replace(_summary(row), lines=lines),
        problem=Problem(id=row["problem_id"], problem=row["problem"], answer=row["answer"]),
        prompt_ids=np.array(row["prompt_ids"], np.int32),
        response_ids=np.array(list(chain.from_iterable(response)), np.int32),
        loss_mask=sampled,
        rollout_logprobs=logprobs,
        policy_versions=versions,
        turns=kept,
    )


_IDS = {True: "completion_ids", False: "tool_ids"}


def _summary(row: dict[str, Any]) -> TrajectorySummary:
    return TrajectorySummary(
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        problem_id=row["problem_id"],
        reward=row["reward"],
        num_calls=row["num_calls"],
        num_failed=row["num_failed"],
        num_answers=row["num_answers"],
        num_turns=len(row["turns"]),
        num_prompt_tokens=len(row["prompt_ids"]),
        num_response_tokens=row["num_response_tokens"],
        num_sampled_tokens=sum(turn["num_tokens"] for turn in row["turns"]),
        stop_reason=StopReason(row["stop_reason"]),
        outcomes=tuple(Outcome(outcome) for turn in row["turns"] for outcome in turn["outcomes"]),
    )
