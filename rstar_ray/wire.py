"""Trajectories as msgpack, for files on disk; arrays travel as raw little-endian bytes.

Between actors trajectories go by object ref, as they are; this form is for what outlives a run.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rstar_ray.outcome import Outcome
from rstar_ray.run_dir.durable import write_bytes
from rstar_ray.trajectory import Problem, StopReason, ToolResult, Trajectory, TrajectorySummary, Turn

VERSION = 1
_msgpack: Any = msgpack
_ARRAYS = {
    "prompt_ids": "<i4",
    "response_ids": "<i4",
    "loss_mask": "|b1",
    "rollout_logprobs": "<f4",
    "policy_versions": "<i4",
}
_PROBLEM = ("id", "problem", "answer", "family", "difficulty")
_TURN = ("num_tokens", "policy_version", "generate_s", "tool_s")
_SUMMARY = tuple(name for name in TrajectorySummary.__dataclass_fields__ if name not in ("outcomes", "stop_reason"))


def encode_trajectory(trajectory: Trajectory) -> bytes:
    summary = trajectory.summary
    return _msgpack.packb(
        {
            "version": VERSION,
            "summary": {name: getattr(summary, name) for name in _SUMMARY}
            | {"outcomes": [str(outcome) for outcome in summary.outcomes], "stop_reason": str(summary.stop_reason)},
            "problem": {name: getattr(trajectory.problem, name) for name in _PROBLEM},
            "turns": [_pack_turn(turn) for turn in trajectory.turns],
            **{name: getattr(trajectory, name).astype(dtype).tobytes() for name, dtype in _ARRAYS.items()},
        }
    )


def decode_trajectory(data: bytes) -> Trajectory:
    """Raises `ValueError` for another version's data."""
    return _unpack(_msgpack.unpackb(data))


def write_archive(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """One file of trajectories, each a msgpack object, put in place whole."""
    write_bytes(path, b"".join(map(encode_trajectory, trajectories)))


def read_archive(path: Path) -> Iterator[Trajectory]:
    with path.open("rb") as file:
        for packed in _msgpack.Unpacker(file, max_buffer_size=0):
            yield _unpack(packed)


def _pack_turn(turn: Turn) -> dict[str, Any]:
    results = [
        {"outcome": str(result.outcome), "text": result.text, "wall_s": result.wall_s} for result in turn.tool_results
    ]
    return {name: getattr(turn, name) for name in _TURN} | {"tool_results": results}


def _unpack(packed: dict[str, Any]) -> Trajectory:
    if packed.get("version") != VERSION:
        raise ValueError(f"a trajectory of version {packed.get('version')!r}; this code reads version {VERSION}")
    summary = packed["summary"]
    return Trajectory(
        summary=TrajectorySummary(
            **{name: summary[name] for name in _SUMMARY},
            outcomes=tuple(Outcome(outcome) for outcome in summary["outcomes"]),
            stop_reason=StopReason(summary["stop_reason"]),
        ),
        problem=Problem(**packed["problem"]),
        turns=tuple(_unpack_turn(turn) for turn in packed["turns"]),
        **{name: _array(packed[name], dtype) for name, dtype in _ARRAYS.items()},
    )


def _unpack_turn(turn: dict[str, Any]) -> Turn:
    results = [
        ToolResult(outcome=Outcome(result["outcome"]), text=result["text"], wall_s=result["wall_s"])
        for result in turn["tool_results"]
    ]
    return Turn(**{name: turn[name] for name in _TURN}, tool_results=tuple(results))


def _array(data: bytes, dtype: str) -> NDArray[Any]:
    native = np.dtype(dtype).newbyteorder("=")
    return np.frombuffer(data, dtype=dtype).astype(native)  # a copy: the buffer is read-only
