"""Published problem sets as training problems: judged row by row, deduplicated, decontaminated, counted by reason.

python recipes/prepare.py deepmath.parquet --out problems.jsonl --integer-answers --against aime2024.jsonl math500.jsonl
python recipes/prepare.py BytedTsinghua-SIA/DAPO-Math-17k --out dapo.jsonl --integer-answers --english
python recipes/prepare.py gpqa_diamond.csv --out gpqa.jsonl --keep-duplicates
python recipes/prepare.py BFCL_v3_simple.json --answers possible_answer/BFCL_v3_simple.json --out bfcl.jsonl
python recipes/prepare.py problems.jsonl --check
python recipes/prepare.py problems.jsonl --out kept.jsonl --pass-rates runs/mine/evaluations/problems-0123456789ab.jsonl
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import tyro

from rstar_ray.config.options import run_command
from rstar_ray.data.columns import Columns, RawProblem, find_columns, problem_column, question_text, raw_problem
from rstar_ray.data.overlap import NGRAM_WORDS
from rstar_ray.data.preparation import PassRates, Prepared, Rules, prepare
from rstar_ray.data.published import ANSWERED_APART, Form, published_form
from rstar_ray.data.tables import FORMATS, read_table
from rstar_ray.errors import ConfigError, one_line
from rstar_ray.run_dir.durable import to_row, write_bytes, write_json, write_text

SOLVED = (2, 1_000_000)
"""How often the policy of --pass-rates solved what is kept, at least and at most."""
COUNTS = ".counts.json"
"""Ending of the file of counts beside the output."""


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Columns of the sources; empty finds known names. Dots lead into objects: reward_model.ground_truth"""

    problem: str = ""
    answer: str = ""
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Problems from files (jsonl, json, csv, parquet), folders of them, or Hugging Face dataset names."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional]
    """files, folders, or dataset names as owner/name[/part][:split]; the first of several equal problems stays"""
    out: Path | None = None
    """output file, .jsonl or .parquet; FILE.counts.json beside it holds the counts"""
    check: bool = False
    """report only, write nothing"""
    columns: ColumnNames = field(default_factory=ColumnNames)
    answers: Path | None = None
    """a file of {"id", "ground_truth"}, for sets that keep their answers apart (BFCL)"""
    integer_answers: bool = False
    """keep only integer answers, as the paper does, as plain numbers; problems with another reward than math
    stay unchanged
    """
    english: bool = False
    """drop problems in other scripts, such as the Chinese half of DAPO-Math-17k"""
    max_chars: int = 0
    """longest problem kept [characters]; 0 keeps all"""
    keep_duplicates: bool = False
    """keep exact and near duplicates"""
    against: tuple[str, ...] = ()
    """evaluation sets, with or without answers: problems that share words in a row with one of theirs are dropped"""
    against_words: int = NGRAM_WORDS
    """length of the word sequences (the paper's 8-grams)"""
    pass_rates: Path | None = None
    """a policy's results on these problems, one row per problem: a file that recipes/evaluate.py wrote to
    evaluations/
    """
    solved_at_least: int = SOLVED[0]
    """with --pass-rates: keep problems solved at least this many times (the paper: twice in 16)"""
    solved_at_most: int = SOLVED[1]
    """with --pass-rates: keep problems solved at most this many times"""

    def check_values(self) -> None:
        """Refuse invalid options before anything is read."""
        if not self.sources:
            raise ConfigError("sources", "no source is named", "name files, folders or dataset names")
        if self.out is None and not self.check:
            raise ConfigError("--out", "nowhere to write", "name a .jsonl or .parquet file, or give --check")
        if self.out is not None and self.out.suffix not in (".jsonl", ".parquet"):
            raise ConfigError("--out", f"{self.out.name} is neither", "name a file that ends in .jsonl or .parquet")
        if self.out is not None and not self.out.absolute().parent.is_dir():
            raise ConfigError("--out", f"{self.out.absolute().parent} does not exist", "make the folder first")
        if self.out is not None and self.out.is_dir():
            raise ConfigError("--out", f"{self.out} is a folder", "name a file")
        read = [Path(one) for one in (*self.sources, *self.against, self.answers, self.pass_rates) if one]
        if self.out is not None and self.out.exists() and any(one.exists() and self.out.samefile(one) for one in read):
            raise ConfigError("--out", f"{self.out} is read from itself", "name another file")
        for option, value in (("--max-chars", self.max_chars), ("--solved-at-least", self.solved_at_least)):
            if value < 0:
                raise ConfigError(option, f"{value} is below 0", "give 0 or more")
        if self.against_words < 1:
            raise ConfigError("--against-words", f"{self.against_words} words", "give at least 1")
        if self.solved_at_most < self.solved_at_least:
            hint = "raise it or lower --solved-at-least"
            raise ConfigError("--solved-at-most", f"{self.solved_at_most} leaves nothing to keep", hint)
        self._check_beside()

    def _check_beside(self) -> None:
        asked = (self.solved_at_least, self.solved_at_most)
        if self.pass_rates is None and asked != SOLVED:
            option = "--solved-at-least" if asked[0] != SOLVED[0] else "--solved-at-most"
            raise ConfigError(option, "nothing says how often a problem was solved", "give --pass-rates too")
        if not self.against and self.against_words != NGRAM_WORDS:
            raise ConfigError("--against-words", "no evaluation set is named", "give --against too")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 refused, 130 stopped; no file is written in part."""
    return run_command(PrepareConfig, _prepare, argv, description=__doc__)


def _prepare(config: PrepareConfig) -> None:
    config.check_values()
    began_s = time.monotonic()
    prepared = prepare_sources(config)
    print(table(prepared), flush=True)
    if not prepared.problems:
        raise ConfigError("sources", "no problem is left", "see the counts; loosen what dropped them")
    if config.out is not None and not config.check:
        write(prepared, config)
        seconds = time.monotonic() - began_s
        print(f"{len(prepared.problems)} problems in {config.out}, {seconds:.1f} s", flush=True)


def prepare_sources(config: PrepareConfig) -> Prepared:
    """Everything but writing."""
    stems = [Path(name).stem for name in config.against]
    against = {
        stem if stems.count(stem) == 1 else name: list(evaluation_texts(name, config.columns.problem))
        for stem, name in zip(stems, config.against, strict=True)
    }
    if not against:
        print("no --against: nothing is checked for problems of evaluation sets", flush=True)
    rates = None
    if config.pass_rates is not None:
        rates = PassRates(
            solved=read_pass_rates(config.pass_rates),
            at_least=config.solved_at_least,
            at_most=config.solved_at_most,
        )
    rules = Rules(
        integer_answers=config.integer_answers,
        english=config.english,
        max_chars=config.max_chars,
        duplicates=not config.keep_duplicates,
        against=against,
        ngram_words=config.against_words,
        pass_rates=rates,
    )
    apart = read_answers(config.answers) if config.answers is not None else {}
    rows = chain.from_iterable(source_rows(source, config.columns, apart, show=True) for source in config.sources)
    return prepare(rows, rules, name=Path(config.sources[0].partition(":")[0]).stem)


def source_rows(
    source: str, names: ColumnNames, apart: Mapping[str, Any] | None = None, *, show: bool = False
) -> Iterator[RawProblem]:
    """The problems of a source; `apart`: answers by id."""
    for name, rows in _tables(source):
        yield from _problems(name, rows, names, apart or {}, show=show)


def evaluation_texts(source: str, column: str) -> Iterator[str]:
    """The questions of an evaluation set, without answers or the instructions that published forms add to each.

    `column` is used where a table has it, else a known name. Raises `ConfigError` for a table without either.
    """
    for name, rows in _tables(source):
        found, number = "", 0
        for number, row in rows:
            found = found or problem_column(row, column, where=f"{name}, row {number}")
            yield question_text(row, found, where=f"{name}, row {number}")
        if not number:
            raise ConfigError(name, "holds no row", "name a file with problems")


def _tables(source: str) -> Iterator[tuple[str, Iterator[tuple[int, Any]]]]:
    """The tables of a source by name: a file, a folder's files in order, or a dataset of the Hugging Face hub.

    Of a folder neither hidden files nor the counts that this command writes are read.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _is_table(file.relative_to(path)))
        if not files:
            raise ConfigError(source, f"the folder holds no {', '.join(FORMATS)} file", "name files")
        for file in files:
            yield file.name, read_table(file)
    elif path.exists() or path.suffix in FORMATS:
        yield path.name, read_table(path)
    else:
        yield source, _hub_rows(source)


def _is_table(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix in FORMATS and not path.name.endswith(COUNTS) and not hidden


def _problems(
    name: str, rows: Iterator[tuple[int, Any]], names: ColumnNames, apart: Mapping[str, Any], *, show: bool
) -> Iterator[RawProblem]:
    columns: Columns | None = None
    form: Form | None = None
    number = 0
    for number, row in rows:
        where = f"{name}, row {number}"
        if form is None and columns is None and names == ColumnNames():
            form = published_form(row)
            if form and show:
                print(f"{name}: {form.__doc__}", flush=True)
        if apart and (form is None or form not in ANSWERED_APART):
            hint = "leave it out, or prepare the set that it belongs to alone"
            raise ConfigError("--answers", f"the rows of {name} have their answers in them", hint)
        if form is not None:
            if published_form(row) is not form:
                raise ConfigError(where, "has other columns than the first row", "prepare sets of two forms apart")
            yield form(row, where, apart)
            continue
        if columns is None:
            columns = find_columns(row, where=where, problem=names.problem, answer=names.answer, id_column=names.id)
            if show:
                print(f"{name}: reading {columns}", flush=True)
        yield raw_problem(row, columns, where=where)
        if show and number % 50_000 == 0:
            print(f"{name}: {number:,} rows", flush=True)
    if not number:
        raise ConfigError(name, "holds no row", "name a file with problems")


def _hub_rows(source: str) -> Iterator[tuple[int, Any]]:
    """Streamed from the hub, so that only what is read is downloaded."""
    name, _, split = source.partition(":")
    if name.count("/") not in (1, 2):
        hint = f"name an existing file or folder ({', '.join(FORMATS)}), or a dataset as owner/name[/part][:split]"
        raise ConfigError(source, "there is no such file", hint)
    import datasets

    datasets.disable_progress_bars()
    try:
        rows: Any = datasets.load_dataset(
            "/".join(name.split("/")[:2]), *name.split("/")[2:], split=split or "train", streaming=True
        )
        yield from enumerate(rows, start=1)
    except Exception as error:  # the hub's client raises two dozen kinds, from no network to no such split
        hint = "where there is no network, bring its parquet files and name them"
        raise ConfigError(source, f"the hub gives no such dataset ({one_line(error)})", hint) from error


def read_answers(path: Path) -> dict[str, Any]:
    """Answers that a set keeps apart: rows of {"id", "ground_truth"}."""
    answers: dict[str, Any] = {}
    for number, row in read_table(path):
        if not isinstance(row, dict) or "id" not in row or "ground_truth" not in row:
            where = f"{path.name}, row {number}"
            raise ConfigError(where, "lacks id or ground_truth", "name the file of answers that belongs to the set")
        answers[str(row["id"])] = row["ground_truth"]
    return answers


def read_pass_rates(path: Path) -> dict[str, int]:
    """How often each problem was solved: rows of {"id", "num_correct"}."""
    solved: dict[str, int] = {}
    for number, row in read_table(path):
        count: Any = row.get("num_correct") if isinstance(row, dict) else None
        if not isinstance(row, dict) or "id" not in row or not isinstance(count, int):
            where = f"{path.name}, row {number}"
            raise ConfigError(where, "lacks id or num_correct", "name a file that recipes/evaluate.py wrote")
        solved[str(row["id"])] = count
    return solved


def table(prepared: Prepared) -> str:
    """The counts by reason, one a line; they add up to the rows read."""
    lines = [f"{prepared.read:>9,}  rows read"]
    lines += [f"{count:>9,}  {reason}" for reason, count in prepared.dropped.items()]
    return "\n".join([*lines, f"{len(prepared.problems):>9,}  kept"])


def write(prepared: Prepared, config: PrepareConfig) -> None:
    """The problems and, beside them, the counts and what they were made with; each file whole or not at all."""
    assert config.out is not None
    rows = [problem.as_row() for problem in prepared.problems]
    if config.out.suffix == ".parquet":
        import io

        import pyarrow as arrow
        import pyarrow.parquet as parquet

        if any("metadata" in row for row in rows):  # as text: a column has one type, the rows' objects may not
            rows = [row | {"metadata": json.dumps(row["metadata"]) if "metadata" in row else None} for row in rows]
        if any("environment" in row for row in rows):
            rows = [row | {"environment": row.get("environment")} for row in rows]
        buffer = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), buffer)
        write_bytes(config.out, buffer.getvalue())
    else:
        write_text(config.out, "".join(map(to_row, rows)))
    asked = json.loads(json.dumps(asdict(config), default=str))
    counts = {"read": prepared.read, "kept": len(prepared.problems), "dropped": prepared.dropped, "settings": asked}
    write_json(config.out.with_name(f"{config.out.name}{COUNTS}"), counts)


if __name__ == "__main__":
    sys.exit(main())
