"""Converts a file of conversations to rows of tokens, in several processes: rendered, masked, counted.

The rows keep the file's order whatever the number of processes. Conversations that do not fit are excluded and
reported with the reason; more than a set share of them is refused.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from rstar_ray.algorithm.update import SftExample
from rstar_ray.chat.load_chat import configured_chat, load_chat
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig, SftConfig
from rstar_ray.data.conversation import Conversation, RowError, conversation
from rstar_ray.data.sft import RowProblem, encode
from rstar_ray.data.tables import half_character, read_table, readable
from rstar_ray.errors import ConfigError

log = logging.getLogger(__name__)

CHUNK = 128
"""Rows per task of a process."""
SERIAL_ROWS = 2 * CHUNK
"""Smaller files are converted in this process."""
MAX_PROCESSES = 16
PAPER_EPOCHS = 3
"""Epochs of the paper's SFT (arXiv:2508.20722 section 4.1)."""
HANDFUL = 5
"""More epochs than that are reported, with the number of steps for fewer."""
MANY_EPOCHS = 10
"""More epochs are only accepted where the user set the steps: they may be meant for a larger file."""


@dataclass(frozen=True, slots=True)
class ChatSource:
    """How a process finds the chat format; `folder` None is the tiny world's tokenizer, which is made again."""

    folder: str | None
    config: ChatConfig = field(default_factory=ChatConfig)

    def load(self) -> TokenizerChat:
        if self.folder is None:
            from rstar_ray.tiny.tokenizer import make_tokenizer

            return configured_chat(make_tokenizer(), self.config, generation={}, instruct=False)
        return load_chat(Path(self.folder), self.config, instruct=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan:
    """The rows to train on, and the excluded conversations."""

    examples: list[SftExample]  # in the file's order
    num_conversations: int  # conversations read, with the excluded ones
    left_out: list[RowProblem]
    seconds: float
    num_processes: int
    source: str  # digest of the file

    @property
    def num_tokens(self) -> int:
        return sum(len(example.token_ids) for example in self.examples)

    def lines(self, sft: SftConfig, num_rows: int) -> list[str]:
        """A summary for the user: size, speed, epochs, and the excluded conversations by reason, each with an
        example.

        `num_rows` are the rows trained on, without held-back ones.
        """
        used = self.num_conversations - len(self.left_out)
        trained = sum(int(example.loss_mask.sum()) for example in self.examples)
        rate = self.num_tokens / max(self.seconds, 1e-9)
        processes = f"{self.num_processes} process{'' if self.num_processes == 1 else 'es'}"
        lines = [
            f"sft: {used:,} of {self.num_conversations:,} conversations as {len(self.examples):,} rows, "
            f"{self.num_tokens:,} tokens ({trained:,} trained on), in {self.seconds:.1f} s "
            f"({rate:,.0f} tokens/s, {processes})",
            _epochs_line(sft, num_rows),
        ]
        counted = Counter(problem.kind for problem in self.left_out)
        first = {problem.kind: problem for problem in reversed(self.left_out)}
        lines += [f"sft: excluded {count:,}: such as {first[kind]}" for kind, count in counted.most_common(10)]
        return lines


def epochs(sft: SftConfig, num_rows: int) -> float:
    """How often each row is trained on."""
    return sft.steps * sft.batch_size / num_rows


def steps_of_paper(sft: SftConfig, num_rows: int) -> int:
    """Steps that make as many epochs as the paper's."""
    return max(1, round(PAPER_EPOCHS * num_rows / sft.batch_size))


def refuse_many_epochs(sft: SftConfig, num_rows: int) -> None:
    """Raise `ConfigError` for a default number of steps that would repeat this file many times."""
    count = epochs(sft, num_rows)
    if count > MANY_EPOCHS:
        raise ConfigError(
            "--sft.steps",
            f"it is not given, and {sft.steps} steps of {sft.batch_size} are {count:,.0f} epochs of the {num_rows} "
            f"rows of {Path(sft.data).name}",
            f"give --sft.steps {steps_of_paper(sft, num_rows)} for {PAPER_EPOCHS}, as the paper's has, or "
            f"--sft.steps {sft.steps} for so many",
        )


def _epochs_line(sft: SftConfig, num_rows: int) -> str:
    count = epochs(sft, num_rows)
    line = f"sft: {sft.steps:,} steps of {sft.batch_size} are {count:,.1f} epochs of the {num_rows:,} rows to train on"
    fewer = f"; --sft.steps {steps_of_paper(sft, num_rows)} makes {PAPER_EPOCHS}, as the paper's has"
    return line + fewer * (count > HANDFUL)


def plan_sft(
    path: str | Path,
    source: ChatSource,
    *,
    max_tokens: int,
    max_left_out: float,
) -> SftPlan:
    """Every conversation of a jsonl, json, csv or parquet file as tokens.

    Raises `ConfigError` for a file that cannot be read, and where more than the share `max_left_out` does not fit:
    as soon as that is certain of a first thousand rows, or at the end.
    """
    started_s = time.perf_counter()
    path = Path(path)
    chunks = _chunks(_raw_rows(path))
    first = list(islice(chunks, SERIAL_ROWS // CHUNK + 1))
    serial = len(first) * CHUNK <= SERIAL_ROWS
    count = 1 if serial else min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    examples: list[SftExample] = []
    left_out: list[RowProblem] = []
    total, logged_s = 0, started_s
    work = ((source, path.name, chunk, max_tokens) for chunk in chain(first, chunks))
    with closing(_in_order(work, count)) as results:
        for made, problems, rows in results:
            examples += made
            left_out += problems
            total += rows
            if total >= 1_000:
                _refuse_too_many(left_out, total, max_left_out)
            if time.perf_counter() - logged_s > 5:
                logged_s = time.perf_counter()
                log.info(f"sft: {total:,} conversations read, {len(left_out):,} excluded")
    if not total:
        raise ConfigError("--sft.data", f"{path.name} has no row", "name a file with conversations")
    _refuse_too_many(left_out, total, max_left_out)
    seconds = time.perf_counter() - started_s
    return SftPlan(
        examples=examples,
        num_conversations=total,
        left_out=left_out,
        seconds=seconds,
        num_processes=count,
        source=_file_digest(path),
    )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _refuse_too_many(left_out: list[RowProblem], total: int, limit: float) -> None:
    if len(left_out) > limit * total or len(left_out) == total:
        counted = Counter(problem.kind for problem in left_out)
        kind, count = counted.most_common(1)[0]
        first = next(problem for problem in left_out if problem.kind == kind)
        raise ConfigError(
            "--sft.data",
            f"{len(left_out)} of the first {total} conversations do not fit, {count} of them like {first}",
            f"fix the file, or raise --sft.max-left-out above {len(left_out) / total:.2g}",
        )


# ---------------------------------------------------------------- rows of files


Raw = tuple[int, Any]
"""Number in the file, and the row; unparsed JSON is a line of bytes."""


def _raw_rows(path: Path) -> Iterator[Raw]:
    try:
        if path.suffix == ".jsonl" and path.is_file():
            yield from readable(path, _lines)
        else:
            yield from read_table(path)
    except ConfigError as refused:
        raise ConfigError(f"--sft.data {refused.field}", refused.problem, refused.hint) from None


def _lines(path: Path) -> Iterator[Raw]:
    with path.open("rb") as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _chunks(rows: Iterator[Raw]) -> Iterator[list[Raw]]:
    while chunk := list(islice(rows, CHUNK)):
        yield chunk


# ---------------------------------------------------------------- in a process


Work = tuple[ChatSource, str, list[Raw], int]
Done = tuple[list[SftExample], list[RowProblem], int]


def _in_order(work: Iterable[Work], count: int) -> Generator[Done, None, None]:
    if count == 1:
        yield from map(_plan_chunk, work)
        return
    # Forked processes would inherit torch's threads and the locks these hold.
    with multiprocessing.get_context("spawn").Pool(count, initializer=_one_thread) as pool:
        yield from pool.imap(_plan_chunk, work)


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@lru_cache(maxsize=2)
def _chat(source: ChatSource) -> TokenizerChat:
    return source.load()


def _plan_chunk(work: Work) -> Done:
    source, name, rows, max_tokens = work
    conversations: list[Conversation] = []
    problems: list[RowProblem] = []
    for number, raw in rows:
        where = f"{name}:{number}"
        try:
            conversations.append(conversation(_row(raw), where))
        except RowError as error:
            problems.append(RowProblem(where, str(error)))
    examples, more = encode(_chat(source), conversations, max_tokens=max_tokens)
    return examples, [*problems, *more], len(rows)


def _row(raw: Any) -> Any:
    if not isinstance(raw, bytes):
        return _without_none(raw)
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise RowError("no JSON") from error
    if b"\\ud" in raw.lower() and (half := half_character(row)):
        raise RowError(f"half a character ({half})")
    return row


def _without_none(value: Any) -> Any:
    """Parquet fills missing fields of a struct with None, which templates would print."""
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {name: _without_none(field) for name, field in fields.items() if field is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in cast(list[Any], value)]
    return value
