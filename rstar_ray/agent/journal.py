"""The journal of finished turns: after a crash, rollouts resume after their last finished turn.

Each worker appends to a separate file, one record per finished turn: length and checksum of the record, a line of
JSON, and arrays. A record names the weights that sampled the turn and the tokens that it continues, from the prompt
on. A reader accepts only a chain of records with known weights and the same prompt, budgets and seed. Of a rollout
that restarted, only the latest start counts. A record torn by a crash ends its file. An unfinished turn is not
recorded: it is sampled again from the same seed.
"""

import contextlib
import json
import logging
import os
import re
import struct
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rstar_ray.agent.rollout import RolloutState
from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Placement, StopReason, ToolMemory, ToolResult, Turn

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 8
"""Most steps with running rollouts per writer; an evaluation counts as one."""
_FRAME = struct.Struct("<II")  # length of the record, and its CRC-32 starting from `_FORM`
_PLAYED_FOR = re.compile(r"(?P<stage>\w+)/(?P<step>\d+)/|(?P<choice>\w+)/filter/|evaluate/(?P<evaluated>\w+)/")  # ids
_COLUMNS = (("response_ids", "<i4"), ("loss_mask", "|b1"), ("logprobs", "<f4"), ("policy_versions", "<i4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One finished turn, from token `start` of the response on."""

    rollout_id: str
    weights: int  # checksum of the weights that sampled it; `weights_of` combines several versions
    start: int
    continues: int  # CRC-32 of the request's settings, the prompt's tokens and the response's before `start`
    num_tokens: int  # 0 and no turns: the rollout restarts from its prompt
    first_turn: int  # index of the first of `turns`
    turns: list[dict[str, Any]]  # turns of these tokens; earlier turns got tool results
    prompt_ids: list[int] | None  # where the rollout's first request replaced the prompt
    final_text: str
    num_answers: int
    stop_reason: str | None
    memories: dict[str, dict[str, Any]]  # of tools with state
    reward: float | None
    restarts: int
    placements: list[dict[str, Any]]
    at_s: float  # time since the epoch


_FORM = zlib.crc32(
    repr([one.name for kind in (TurnRecord, Turn, ToolResult, ToolMemory, Placement) for one in fields(kind)]).encode()
)
"""Files of a version with other fields are skipped, as are zeros after a power failure."""


def weights_of(versions: Iterable[int], known: Mapping[int, int]) -> int | None:
    """The checksum of the weights that sampled a turn, from its tokens' versions and each version's checksum.

    None where a version is unknown, or nothing was sampled.
    """
    named = sorted({version for version in versions if version >= 0})
    if not named or not known.keys() >= set(named):
        return None
    if len(named) == 1:
        return known[named[0]]
    return zlib.crc32(repr([(version, known[version]) for version in named]).encode())


class TurnJournal:
    """The file that one worker writes. Only `flush` writes to the disk."""

    def __init__(self, folder: Path, writer: str) -> None:
        """`folder` is the run's journal; `writer` is a unique name of the worker process."""
        self._folder = folder
        self._name = re.sub(r"\W+", "-", writer)
        self._files: dict[Path, BinaryIO] = {}
        self._num_torn = 0  # files whose writing failed
        self._unwritten: deque[tuple[Path, bytes]] = deque()

    def add(self, before: RolloutState, after: RolloutState, weights: int) -> None:
        """Record the turn between two states of a rollout. Ids of no step or evaluation are not recorded."""
        folder = turns_folder(self._folder, after.request.rollout_id)
        if folder is None:
            return
        start = len(before.response_ids)
        pairs = zip(before.turns, after.turns, strict=False)
        same = next((number for number, (one, other) in enumerate(pairs) if one != other), len(before.turns))
        record = TurnRecord(
            rollout_id=after.request.rollout_id,
            weights=weights,
            start=start,
            continues=_context_crc(before),
            num_tokens=len(after.response_ids) - start,
            first_turn=same,
            turns=[asdict(turn) for turn in after.turns[same:]],
            prompt_ids=None if after.prompt_ids == before.prompt_ids else after.prompt_ids,
            final_text=after.final_text,
            num_answers=after.num_answers,
            stop_reason=after.stop_reason,
            memories={name: asdict(memory) for name, memory in after.memories.items()},
            reward=after.reward,
            restarts=after.restarts,
            placements=[asdict(placement) for placement in after.placements],
            at_s=time.time(),
        )
        columns = [np.array(getattr(after, name)[start:], kind).tobytes() for name, kind in _COLUMNS]
        body = b"".join((json.dumps(asdict(record)).encode(), b"\n", *columns))
        self._unwritten.append((folder, _FRAME.pack(len(body), zlib.crc32(body, _FORM)) + body))

    def restart(self, state: RolloutState, weights: int) -> None:
        """Record that the rollout restarts from its prompt: earlier records no longer count."""
        self.add(state, state, weights)

    @property
    def has_unwritten(self) -> bool:
        """Whether records wait for a `flush` or for the end of a running one."""
        return bool(self._unwritten)

    @property
    def unwritten_bytes(self) -> int:
        return sum(len(frame) for _, frame in self._unwritten.copy())

    def flush(self) -> None:
        """Write the added records to disk, so that they survive this process. Thread-safe; calls are serialized.

        After a failure the unwritten records are dropped. The end of their file is torn, so later records go to
        another file.
        """
        try:
            if any(not folder.exists() or not os.fstat(file.fileno()).st_nlink for folder, file in self._files.items()):
                self._close_files()  # the folder was removed when its step ended
            count = len(self._unwritten)  # other threads may add more meanwhile
            for position in range(count):
                folder, frame = self._unwritten[position]
                self._file(folder).write(frame)
            for file in self._files.values():
                file.flush()
            for _ in range(count):
                self._unwritten.popleft()
        except BaseException:
            self._unwritten.clear()
            self._num_torn += 1
            self._close_files()
            raise

    def close(self) -> None:
        self.flush()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # every record is written, or its failure was raised
                file.close()
        self._files.clear()

    def _file(self, folder: Path) -> BinaryIO:
        if folder not in self._files:
            if len(self._files) >= MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()  # the oldest: its step has most likely ended
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{self._name}-{self._num_torn}" if self._num_torn else self._name
            self._files[folder] = (folder / f"{name}.turns").open("ab")
        return self._files[folder]


def turns_folder(journal: Path, rollout_id: str) -> Path | None:
    """The folder of all turns for one training step, one evaluation, or one choice of a hard set; None for others."""
    played_for = _PLAYED_FOR.match(rollout_id)
    if played_for is None:
        return None
    if choice := played_for["choice"]:
        return journal / choice_folder(choice)
    if evaluated := played_for["evaluated"]:
        return journal / evaluation_folder(evaluated)
    return journal / f"{played_for['stage']}-step-{int(played_for['step']):06d}"


def choice_folder(stage: str) -> str:
    """The journal's name for the hard set's rollouts of this stage."""
    return f"{stage}-filter"


def evaluation_folder(stage: str) -> str:
    """The journal's name for the evaluations of this stage, one after the other."""
    return f"{stage}-evaluation"


def journaled(
    journal: Path,
    starts: Collection[RolloutState],
    known: Mapping[int, int],
    *,
    same: "re.Pattern[str] | None" = None,
) -> dict[str, RolloutState]:
    """Started rollouts among the requests, at their last finished turn, by id.

    `known` has the checksum of each policy version; only turns sampled by known weights count. Of several turns after
    the same tokens the latest counts: a resumed run that did not know the earlier weights sampled the turn again. A
    rollout with a token older than its request allows starts from its prompt. `same` matches the part of an id that
    names the attempt. A file that cannot be read is skipped with a warning.
    """

    def plain(rollout_id: str) -> str:
        return same.sub("", rollout_id) if same else rollout_id

    wanted = {plain(state.request.rollout_id): state for state in starts}
    folders = {turns_folder(journal, state.request.rollout_id) for state in starts} - {None}
    records: dict[str, list[tuple[TurnRecord, bytes]]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.turns")) if folder else ():
            try:
                for record, columns in read(path):
                    name = plain(record.rollout_id)
                    if name in wanted and _sampled_by(record, columns, known):
                        records.setdefault(name, []).append((record, columns))
            except OSError as failed:
                log.warning("%s cannot be read (%s): its rollouts under way are sampled again", path, failed)
    found = [_Chain(rows).follow(wanted[name]) for name, rows in records.items()]
    return {
        state.request.rollout_id: state
        for state in found
        if (state.turns or state.restarts) and _oldest(state) >= state.request.oldest_version
    }


def _sampled_by(record: TurnRecord, columns: bytes, known: Mapping[int, int]) -> bool:
    """Whether known weights sampled it. A restart record has no tokens, so it counts under any weights."""
    if not record.num_tokens:
        return record.weights in known.values()
    offset = sum(np.dtype(kind).itemsize for name, kind in _COLUMNS if name != "policy_versions") * record.num_tokens
    versions = np.frombuffer(columns, "<i4", record.num_tokens, offset)
    return record.weights == weights_of(np.unique(versions).tolist(), known)


def _oldest(state: RolloutState) -> int:
    versions = [version for version in state.policy_versions if version >= 0]
    return min(versions, default=state.request.oldest_version)


class _Chain:
    """Records of one rollout since its latest start."""

    def __init__(self, records: Iterable[tuple[TurnRecord, bytes]]) -> None:
        self._restarts = 0
        self._turns: dict[tuple[int, int], tuple[TurnRecord, bytes]] = {}  # the latest that continues these tokens
        for record, columns in sorted(records, key=lambda one: one[0].at_s):
            if record.restarts != self._restarts:  # fewer where a resumed run began the rollout again
                self._restarts = record.restarts
                self._turns.clear()
            if record.turns or record.stop_reason:  # otherwise it would follow itself
                self._turns[record.start, record.continues] = record, columns

    def follow(self, state: RolloutState) -> RolloutState:
        """The chain of records from the rollout's start, each continuing the tokens of the previous one."""
        first = state.admitted or state
        state = replace(RolloutState.start(first.request, first.prompt_ids), restarts=self._restarts)
        while state.stop_reason is None:
            turn = self._turns.get((len(state.response_ids), _context_crc(state)))
            if turn is None:
                break
            state = _continued(state, *turn)
        return state


def _continued(state: RolloutState, record: TurnRecord, columns: bytes) -> RolloutState:
    longer: dict[str, Any] = {}
    offset = 0
    for name, kind in _COLUMNS:
        values = np.frombuffer(columns, kind, record.num_tokens, offset)
        longer[name] = [*getattr(state, name), *values.tolist()]
        offset += values.nbytes
    if record.prompt_ids is not None:
        state = state.with_prompt(record.prompt_ids)
    return replace(
        state,
        turns=(*state.turns[: record.first_turn], *map(_turn, record.turns)),
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
        ToolResult(
            outcome=Outcome(result["outcome"]), text=result["text"], wall_s=result["wall_s"], tool=result["tool"]
        )
        for result in saved["tool_results"]
    )
    values: dict[str, Any] = {**saved, "tool_results": tuple(results)}
    return Turn(**values)


def read(path: Path) -> Iterator[tuple[TurnRecord, bytes]]:
    """The records of one file with their arrays, up to the first torn one."""
    whole = path.read_bytes()
    position = 0
    while position + _FRAME.size <= len(whole):
        length, crc = _FRAME.unpack_from(whole, position)
        body = whole[position + _FRAME.size : position + _FRAME.size + length]
        if len(body) < length or zlib.crc32(body, _FORM) != crc:
            return
        line, _, columns = body.partition(b"\n")
        yield TurnRecord(**json.loads(line)), columns
        position += _FRAME.size + length


def _context_crc(state: RolloutState) -> int:
    """A checksum of everything that the next token depends on, seed and budgets included."""
    request = state.request
    asked = zlib.crc32(repr((request.seed, request.limits, request.sampling)).encode())
    return _crc(state.response_ids, _crc(state.prompt_ids, asked))


def _crc(token_ids: Sequence[int], before: int) -> int:
    return zlib.crc32(np.array(token_ids, "<i4").tobytes(), before)
