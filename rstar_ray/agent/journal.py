"""Turns of rollouts on disk, so that who dies takes little of what was sampled along.

Each worker appends to a file of its own, one record a finished turn, and now and then one for what was sampled of
turns under way: the length and checksum of what follows, a line of JSON, and arrays. A record says which weights
sampled it and what it continues, the prompt's tokens first of all; read again, only a chain of the same weights from
the first turn on counts, and only behind the same prompt, under the same budgets and seed; of a rollout that began
again, only its latest beginning. A record that was torn by a crash ends its file.
"""

import contextlib
import json
import os
import re
import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rstar_ray.agent.rollout import RolloutState
from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Completion, Placement, StopReason, ToolMemory, ToolResult, Turn

_FRAME = struct.Struct("<II")  # length of what follows, and its CRC-32 from `_FORM` on
_PLAYED_FOR = re.compile(r"(?P<stage>\w+)/(?P<step>\d+)/|(?P<choice>\w+)/filter/|evaluate/(?P<evaluated>\w+)/")  # ids
_PART_COLUMNS = (("token_ids", "<i4"), ("logprobs", "<f4"), ("policy_versions", "<i4"))
_COLUMNS = (("response_ids", "<i4"), ("loss_mask", "|b1"), ("logprobs", "<f4"), ("policy_versions", "<i4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One finished turn, from token `start` of the response on."""

    rollout_id: str
    weights: int  # checksum of the weights that sampled it
    start: int
    continues: int  # CRC-32 of how it was asked, of the prompt's tokens and of the response's before `start`
    num_tokens: int
    turns: list[dict[str, Any]]  # those that these tokens hold
    final_text: str
    num_answers: int
    stop_reason: str | None
    memories: dict[str, dict[str, Any]]  # of tools with state
    reward: float | None
    restarts: int
    placements: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TurnPart:
    """What was sampled of a turn that has not finished, from token `start` of the response on."""

    rollout_id: str
    start: int
    continues: int  # as a record's
    num_tokens: int  # 0 where a rollout begins again, of which nothing before counts
    restarts: int
    spent_s: float  # on the turn, until the last of these
    placements: list[dict[str, Any]]  # in a turn's first part here; empty in those after it


_FORM = zlib.crc32(
    repr([one.name for kind in (TurnRecord, TurnPart, Turn, ToolResult, ToolMemory, Placement)
          for one in fields(kind)]).encode()
)  # fmt: skip
"""What another version of this program wrote is as good as torn, and so are the zeros that a lost power leaves."""


@dataclass(slots=True)
class _Reached:
    """How far a rollout is in the files: its finished turns, and of the next one what was sampled."""

    tokens: int
    turns: int
    crc: int  # as a record's `continues`
    begun_tokens: int = 0
    begun_crc: int = 0  # of all tokens before, and of these
    restarts: int = 0
    placements: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # that no record has yet


class TurnJournal:
    """What one worker writes; nothing is in the file before `flush`, which alone touches the disk."""

    def __init__(self, folder: Path, writer: str) -> None:
        """`folder`: the run's journal. `writer` names the worker and its life, and no other's."""
        self._folder = folder
        self._name = re.sub(r"\W+", "-", writer)
        self._files: dict[Path, BinaryIO] = {}
        self._num_torn = 0  # files that could not be written to their end
        self._unwritten: deque[tuple[Path, bytes]] = deque()
        self._added_bytes = self._gone_bytes = 0  # of it: since the start, and what is no longer there
        self._reached: dict[str, _Reached] = {}  # of each rollout played here

    def begin(self, state: RolloutState) -> None:
        """A rollout goes on here; what it has already is in another's file, or came with the request."""
        crc = _context_crc(state)
        placements = [asdict(placement) for placement in state.placements]
        reached = _Reached(len(state.response_ids), len(state.turns), crc, 0, crc, state.restarts, placements)
        if state.begun is not None:
            reached.begun_tokens, reached.begun_crc = len(state.begun.token_ids), _crc(state.begun.token_ids, crc)
        self._reached[state.request.rollout_id] = reached

    def add(self, state: RolloutState, weights: int) -> None:
        """A turn has finished. Of a rollout whose id does not say what it is played for nothing is kept."""
        path = turns_folder(self._folder, state.request.rollout_id)
        if path is None:
            return
        reached = self._reached.get(state.request.rollout_id) or _Reached(0, 0, _start_crc(state))
        start, turns = reached.tokens, reached.turns
        record = TurnRecord(
            rollout_id=state.request.rollout_id,
            weights=weights,
            start=start,
            continues=reached.crc,
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
        columns = [np.array(getattr(state, name)[start:], kind).tobytes() for name, kind in _COLUMNS]
        self._write(path, asdict(record), columns)
        self.begin(state)
        self._reached[state.request.rollout_id].placements = []

    def begin_again(self, state: RolloutState, weights: int) -> None:
        """From its prompt: what was written of it before counts no more."""
        self.begin(state)
        nothing = Completion(token_ids=[], logprobs=[], policy_versions=[], ended=False)
        self.add_begun({state.request.rollout_id: nothing}, weights)

    def add_begun(self, sampled: Mapping[str, Completion], weights: int) -> None:
        """What was sampled of turns that have not finished since this was last told, by rollout."""
        by_folder: dict[Path, list[tuple[str, _Reached, Completion]]] = {}
        for rollout_id, more in sampled.items():
            folder, reached = turns_folder(self._folder, rollout_id), self._reached.get(rollout_id)
            if folder is not None and reached is not None:
                by_folder.setdefault(folder, []).append((rollout_id, reached, more))
        for folder, rows in by_folder.items():
            columns = [
                np.array([value for _, _, more in rows for value in getattr(more, name)], kind).tobytes()
                for name, kind in _PART_COLUMNS
            ]
            parts: list[tuple[Any, ...]] = []  # as `TurnPart` has it
            at = 0
            for rollout_id, reached, more in rows:
                count = len(more.token_ids)
                start, spent_s = reached.tokens + reached.begun_tokens, round(more.spent_s, 3)
                row = (rollout_id, start, reached.begun_crc, count, reached.restarts, spent_s, reached.placements)
                parts.append(row)
                reached.placements = []
                reached.begun_tokens += count
                reached.begun_crc = zlib.crc32(columns[0][4 * at : 4 * (at + count)], reached.begun_crc)
                at += count
            self._write(folder, {"weights": weights, "parts": parts}, columns)

    def _write(self, folder: Path, head: Mapping[str, Any], columns: Sequence[bytes]) -> None:
        body = b"".join((json.dumps(head).encode(), b"\n", *columns))
        self._unwritten.append((folder, _FRAME.pack(len(body), zlib.crc32(body, _FORM)) + body))
        self._added_bytes += len(body)

    def end(self, rollout_id: str) -> None:
        """It is played here no longer."""
        self._reached.pop(rollout_id, None)

    @property
    def has_unwritten(self) -> bool:
        """Whether anything was added that no `flush` has brought to its end."""
        return bool(self._unwritten)

    @property
    def unwritten_bytes(self) -> int:
        """Of that, about."""
        return self._added_bytes - self._gone_bytes

    def flush(self) -> None:
        """What was added before survives this process; in any thread, one call after the other.

        What cannot be written is given up, and so is its file, whose end is torn: what is added later gets another.
        """
        try:
            if any(not folder.exists() or not os.fstat(file.fileno()).st_nlink for folder, file in self._files.items()):
                self._close_files()  # removed, as all that was played for it had ended; another may have made it anew
            count = len(self._unwritten)  # more may come meanwhile
            for position in range(count):
                folder, frame = self._unwritten[position]
                self._file(folder).write(frame)
            for file in self._files.values():
                file.flush()
            for _ in range(count):
                self._gone_bytes += len(self._unwritten.popleft()[1]) - _FRAME.size
        except BaseException:
            self._unwritten.clear()
            self._gone_bytes = self._added_bytes
            self._num_torn += 1
            self._close_files()
            raise

    def close(self) -> None:
        self.flush()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # all of it is written, or was said not to be
                file.close()
        self._files.clear()

    def _file(self, folder: Path) -> BinaryIO:
        if folder not in self._files:
            for file in self._files.values():
                file.flush()
            self._close_files()  # another step: its rollouts were all done
            folder.mkdir(parents=True, exist_ok=True)
            life = f"{self._name}-{self._num_torn}" if self._num_torn else self._name
            self._files[folder] = (folder / f"{life}.turns").open("ab")
        return self._files[folder]


def turns_folder(journal: Path, rollout_id: str) -> Path | None:
    """Where the turns lie of all that is played for the same training step, evaluation, or choice of a hard set."""
    played_for = _PLAYED_FOR.match(rollout_id)
    if played_for is None:
        return None
    if choice := played_for["choice"]:
        return journal / choice_folder(choice)
    if evaluated := played_for["evaluated"]:
        return journal / evaluation_folder(evaluated)
    return journal / f"{played_for['stage']}-step-{int(played_for['step']):06d}"


def choice_folder(stage: str) -> str:
    """Its name, for the choice of this stage's hard set."""
    return f"{stage}-filter"


def evaluation_folder(stage: str) -> str:
    """Its name, for evaluations of this stage's policy, one after the other."""
    return f"{stage}-evaluation"


def journaled(
    journal: Path,
    starts: Collection[RolloutState],
    weights: int,
    *,
    same: "re.Pattern[str] | None" = None,
    show: Callable[[str], None] = print,
) -> dict[str, RolloutState]:
    """Those of these rollouts that were begun under these weights, as far as they got, by id.

    `same` matches what is left out of an id where attempts at the same rollout are told apart by their ids. A file
    that cannot be read ends there, and a line says so.
    """

    def plain(rollout_id: str) -> str:
        return same.sub("", rollout_id) if same else rollout_id

    wanted = {plain(state.request.rollout_id): state for state in starts}
    folders = {turns_folder(journal, state.request.rollout_id) for state in starts} - {None}
    chains: dict[str, _Chain] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.turns")) if folder else ():
            try:
                for sampled_by, record, columns in read(path):
                    name = plain(record.rollout_id)
                    if sampled_by == weights and name in wanted:
                        chains.setdefault(name, _Chain()).add(record, columns)
            except OSError as failed:
                show(f"{path} cannot be read ({failed}): what it has of rollouts that were under way is sampled again")
    found = (chain.follow(wanted[name]) for name, chain in chains.items())
    return {state.request.rollout_id: state for state in found if state.turns or state.begun or state.restarts}


class _Chain:
    """Records of one rollout since it began for the last time, in any order."""

    def __init__(self) -> None:
        self._restarts = 0
        self._turns: dict[tuple[int, int], tuple[TurnRecord, bytes]] = {}  # the last that continues these tokens
        self._parts: dict[tuple[int, int], tuple[TurnPart, bytes]] = {}

    def add(self, record: TurnRecord | TurnPart, columns: bytes) -> None:
        if record.restarts > self._restarts:
            self._restarts = record.restarts
            self._turns.clear()
            self._parts.clear()
        if record.restarts < self._restarts:
            return
        continues = (record.start, record.continues)
        if isinstance(record, TurnRecord):
            self._turns[continues] = record, columns
        elif record.num_tokens:  # else it would follow itself
            self._parts[continues] = record, columns

    def follow(self, state: RolloutState) -> RolloutState:
        """From its start turn by turn, each continuing the tokens of the one before, and into the next."""
        state = replace(RolloutState.start(state.request, state.prompt_ids), restarts=self._restarts)
        while state.stop_reason is None:
            turn = self._turns.get((len(state.response_ids), _context_crc(state)))
            if turn is None:
                return self._with_begun(state)
            state = _continued(state, *turn)
        return state

    def _with_begun(self, state: RolloutState) -> RolloutState:
        at, crc, spent_s, placements = len(state.response_ids), _context_crc(state), 0.0, state.placements
        lists: dict[str, list[Any]] = {name: [] for name, _ in _PART_COLUMNS}
        while (following := self._parts.get((at, crc))) is not None:
            part, columns = following
            values = [np.frombuffer(columns, kind, part.num_tokens, 4 * i * part.num_tokens)
                      for i, (_, kind) in enumerate(_PART_COLUMNS)]  # fmt: skip
            for (name, _), column in zip(_PART_COLUMNS, values, strict=True):
                lists[name] += column.tolist()
            at, crc, spent_s = at + part.num_tokens, zlib.crc32(columns[: 4 * part.num_tokens], crc), part.spent_s
            placements = tuple(Placement(**placement) for placement in part.placements) or placements
        if not lists["token_ids"]:
            return state
        begun = Completion(
            token_ids=lists["token_ids"],
            logprobs=lists["logprobs"],
            policy_versions=lists["policy_versions"],
            ended=False,
            spent_s=spent_s,
        )
        return replace(state, begun=begun, placements=placements)


def _continued(state: RolloutState, record: TurnRecord, columns: bytes) -> RolloutState:
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


def read(path: Path) -> Iterator[tuple[int, TurnRecord | TurnPart, bytes]]:
    """The records of one file up to the first that is torn: the weights that sampled each, and its arrays."""
    whole = path.read_bytes()
    position = 0
    while position + _FRAME.size <= len(whole):
        length, crc = _FRAME.unpack_from(whole, position)
        body = whole[position + _FRAME.size : position + _FRAME.size + length]
        if len(body) < length or zlib.crc32(body, _FORM) != crc:
            return
        line, _, columns = body.partition(b"\n")
        head = json.loads(line)
        if "parts" not in head:
            yield head["weights"], TurnRecord(**head), columns
        parts = [TurnPart(*row) for row in head.get("parts", ())]
        whole_column = 4 * sum(part.num_tokens for part in parts)
        at = 0
        for part in parts:
            places = [at + i * whole_column for i in range(len(_PART_COLUMNS))]
            yield head["weights"], part, b"".join(columns[place : place + 4 * part.num_tokens] for place in places)
            at += 4 * part.num_tokens
        position += _FRAME.size + length


def _context_crc(state: RolloutState) -> int:
    return _crc(state.response_ids, _start_crc(state))


def _start_crc(state: RolloutState) -> int:
    """What another seed, or other budgets, would have made of the same prompt is another rollout."""
    request = state.request
    return _crc(state.prompt_ids, zlib.crc32(repr((request.seed, request.limits, request.sampling)).encode()))


def _crc(token_ids: list[int], before: int = 0) -> int:
    return zlib.crc32(np.array(token_ids, "<i4").tobytes(), before)
