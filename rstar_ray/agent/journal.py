"""Finished turns of rollouts on disk, so that who dies takes no more than the turn it was in along.

Each worker appends to a file of its own, one record a turn: the length and checksum of what follows, a line of JSON,
and the turn's arrays. A record says which weights sampled it and what it continues; read again, only a chain of turns
of the same weights from the first on counts. A record that was torn by a crash ends its file.
"""

import json
import re
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rstar_ray.agent.rollout import RolloutState
from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Placement, StopReason, ToolMemory, ToolResult, Turn

_FRAME = struct.Struct("<II")  # length and CRC-32 of what follows
_STEP = re.compile(r"(\w+)/(\d+)/")  # how the ids of training rollouts begin
_COLUMNS = (("response_ids", "<i4"), ("loss_mask", "|b1"), ("logprobs", "<f4"), ("policy_versions", "<i4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One finished turn, from token `start` of the response on."""

    rollout_id: str
    weights: int  # checksum of the weights that sampled it
    start: int
    continues: int  # CRC-32 of the response's tokens before `start`
    num_tokens: int
    turns: list[dict[str, Any]]  # those that these tokens hold
    final_text: str
    num_answers: int
    stop_reason: str | None
    memories: dict[str, dict[str, Any]]  # of tools with state
    reward: float | None
    restarts: int
    placements: list[dict[str, Any]]


class TurnJournal:
    """What one worker writes; nothing is in the file before `flush`."""

    def __init__(self, folder: Path, writer: str) -> None:
        """`folder`: the run's journal. `writer` names the worker and its life, and no other's."""
        self._folder = folder
        self._name = re.sub(r"\W+", "-", writer)
        self._files: dict[Path, BinaryIO] = {}
        self._written: dict[str, tuple[int, int]] = {}  # of each rollout played here: tokens and turns

    def begin(self, state: RolloutState) -> None:
        """A rollout goes on here; what it has already is in another's file, or came with the request."""
        self._written[state.request.rollout_id] = len(state.response_ids), len(state.turns)

    def add(self, state: RolloutState, weights: int) -> None:
        """A turn has finished. Rollouts outside training steps are not kept."""
        path = step_folder(self._folder, state.request.rollout_id)
        start, turns = self._written.get(state.request.rollout_id, (0, 0))
        if path is None:
            return
        record = _Record(
            rollout_id=state.request.rollout_id,
            weights=weights,
            start=start,
            continues=_crc(state.response_ids[:start]),
            num_tokens=len(state.response_ids) - start,
            turns=[asdict(turn) for turn in state.turns[turns:]],
            final_text=state.final_text,
            num_answers=state.num_answers,
            stop_reason=state.stop_reason,
            memories={name: asdict(memory) for name, memory in state.memories.items()},
            reward=state.reward,
            restarts=state.restarts,
            placements=[asdict(placement) for placement in state.placements],
        )
        columns = (np.array(getattr(state, name)[start:], kind).tobytes() for name, kind in _COLUMNS)
        body = b"".join((json.dumps(asdict(record)).encode(), b"\n", *columns))
        self._file(path).write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
        self.begin(state)

    def end(self, rollout_id: str) -> None:
        """It is played here no longer."""
        self._written.pop(rollout_id, None)

    def flush(self) -> None:
        """From now on what was added survives this process."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, folder: Path) -> BinaryIO:
        if folder not in self._files:
            self.close()  # another step: its rollouts were all done
            folder.mkdir(parents=True, exist_ok=True)
            self._files[folder] = (folder / f"{self._name}.turns").open("ab")
        return self._files[folder]


def step_folder(journal: Path, rollout_id: str) -> Path | None:
    """Where a step's turns lie; None for rollouts outside training steps."""
    step = _STEP.match(rollout_id)
    return None if step is None else journal / f"{step[1]}-step-{int(step[2]):06d}"


def journaled(
    journal: Path, starts: Collection[RolloutState], weights: int, *, same: "re.Pattern[str] | None" = None
) -> dict[str, RolloutState]:
    """Those of these rollouts that were begun under these weights, at their last finished turn, by id.

    `same` matches what is left out of an id where attempts at the same rollout are told apart by their ids.
    """

    def plain(rollout_id: str) -> str:
        return same.sub("", rollout_id) if same else rollout_id

    wanted = {plain(state.request.rollout_id): state for state in starts}
    folders = {step_folder(journal, state.request.rollout_id) for state in starts} - {None}
    records: dict[str, dict[int, list[tuple[_Record, bytes]]]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.turns")) if folder else ():
            for record, columns in _read(path):
                name = plain(record.rollout_id)
                if record.weights == weights and name in wanted:
                    records.setdefault(name, {}).setdefault(record.start, []).append((record, columns))
    found = {name: _follow(wanted[name], chain) for name, chain in records.items()}
    return {state.request.rollout_id: state for state in found.values() if state.turns}


def _follow(state: RolloutState, chain: dict[int, list[tuple[_Record, bytes]]]) -> RolloutState:
    """From its start turn by turn, each continuing the tokens of the one before."""
    state = replace(state, response_ids=[], loss_mask=[], logprobs=[], policy_versions=[], turns=())
    while state.stop_reason is None:
        crc = _crc(state.response_ids)
        following = [one for one in chain.get(len(state.response_ids), ()) if one[0].continues == crc]
        if not following:
            break
        state = _continued(state, *following[-1])
    return state


def _continued(state: RolloutState, record: _Record, columns: bytes) -> RolloutState:
    longer: dict[str, Any] = {}
    offset = 0
    for name, kind in _COLUMNS:
        values = np.frombuffer(columns, kind, record.num_tokens, offset)
        longer[name] = [*getattr(state, name), *values.tolist()]
        offset += values.nbytes
    return replace(
        state,
        turns=(*state.turns, *map(_turn, record.turns)),
        final_text=record.final_text,
        num_answers=record.num_answers,
        stop_reason=StopReason(record.stop_reason) if record.stop_reason else None,
        memories={name: ToolMemory(**memory) for name, memory in record.memories.items()},
        reward=record.reward,
        restarts=record.restarts,
        placements=tuple(Placement(**placement) for placement in record.placements),
        **longer,
    )


def _turn(saved: dict[str, Any]) -> Turn:
    results = (
        ToolResult(outcome=Outcome(result["outcome"]), text=result["text"], wall_s=result["wall_s"])
        for result in saved["tool_results"]
    )
    return Turn(
        num_tokens=saved["num_tokens"],
        tool_results=tuple(results),
        generate_s=saved["generate_s"],
        tool_s=saved["tool_s"],
    )


def _read(path: Path) -> Iterator[tuple[_Record, bytes]]:
    """The records of one file up to the first that is torn."""
    whole = path.read_bytes()
    position = 0
    while position + _FRAME.size <= len(whole):
        length, crc = _FRAME.unpack_from(whole, position)
        body = whole[position + _FRAME.size : position + _FRAME.size + length]
        if len(body) < length or zlib.crc32(body) != crc:
            return
        line, _, columns = body.partition(b"\n")
        yield _Record(**json.loads(line)), columns
        position += _FRAME.size + length


def _crc(token_ids: list[int]) -> int:
    return zlib.crc32(np.array(token_ids, "<i4").tobytes())
