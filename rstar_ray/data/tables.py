"""Reads the rows of a table one by one, each with its number for messages: jsonl, json, csv and parquet."""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from rstar_ray.errors import ConfigError

FORMATS = (".jsonl", ".json", ".csv", ".parquet")


def read_table(path: Path | str) -> Iterator[tuple[int, Any]]:
    """(number, row) of every row that is not blank; numbers count lines of jsonl, and rows of the others, from 1.

    Rows come as they are read, so that a file may be larger than memory (a json list may not). Raises `ConfigError`
    naming the file, and the row where one is to blame.
    """
    path = Path(path)
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "there is no such file"
        raise ConfigError(str(path), problem, "name an existing jsonl or parquet file")
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        hint = f"name a file that ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ConfigError(path.name, f"{path.suffix or 'no ending'} is not a known format", hint)
    return readable(path, readers[path.suffix])


def readable(path: Path, reader: Callable[[Path], Iterator[tuple[int, Any]]]) -> Iterator[tuple[int, Any]]:
    """The rows of the reader; raises `ConfigError` where the file cannot be read."""
    try:
        yield from reader(path)
    except OSError as refused:
        raise ConfigError(
            str(path), f"cannot be read ({refused.strerror})", "grant your user read permission"
        ) from refused


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as broken:  # not JSON, not UTF-8, or nested too deeply
                    where = f"{path.name}, row {number}"
                    raise ConfigError(where, f"is not JSON ({broken})", "write one JSON object per line") from broken
                if b"\\ud" in line.lower():
                    _refuse_half_characters(row, f"{path.name}, row {number}")
                yield number, row


def half_character(row: Any) -> str:
    """Half of a character, which JSON may spell (`\\ud83d` alone) and nothing can write or encode; empty without."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as broken:
        return f"\\u{ord(broken.object[broken.start]):04x}"
    return ""


def _refuse_half_characters(row: Any, where: str) -> None:
    if half := half_character(row):
        raise ConfigError(where, f"holds half a character ({half})", "write the text whole, or drop the row")


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as broken:
        if isinstance(broken, json.JSONDecodeError) and broken.msg == "Extra data":  # an object a line, as in .jsonl
            yield from _jsonl(path)
            return
        raise ConfigError(path.name, f"is not JSON ({broken})", "write a list of objects") from broken
    if not isinstance(rows, list):
        raise ConfigError(path.name, "is not a list", "write a list of objects, or one object per line as .jsonl")
    for number, row in enumerate(cast(list[Any], rows), start=1):
        _refuse_half_characters(row, f"{path.name}, row {number}")
        yield number, row


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    number = 0
    with path.open(encoding="utf-8-sig", newline="") as lines:
        try:
            for number, row in enumerate(csv.DictReader(lines, strict=True), start=1):
                surplus = cast(dict[Any, Any], row).pop(None, None)
                if surplus is not None:
                    where = f"{path.name}, row {number}"
                    raise ConfigError(where, "has more cells than the header", "quote cells that hold a comma")
                yield number, row
        except UnicodeDecodeError as broken:
            raise ConfigError(f"{path.name}, row {number + 1}", "is not UTF-8", "save the file as UTF-8") from broken
        except csv.Error as broken:
            where = f"{path.name}, row {number + 1}"
            raise ConfigError(where, f"is not csv ({broken})", "quote cells that hold commas or lines") from broken


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    reader: Any = parquet
    try:
        with reader.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1_024))
            yield from enumerate((row for batch in batches for row in batch), start=1)
    except (arrow.ArrowException, OSError, ValueError) as broken:
        if isinstance(broken, ConfigError):
            raise
        raise ConfigError(path.name, f"is not parquet ({broken})", "write the file again") from broken
