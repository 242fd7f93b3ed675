"""Problem files: rows of a question and its true answer."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rstar_ray.errors import ConfigError
from rstar_ray.trajectory import Problem


def load_problems(path: Path | str, *, integer_answers: bool) -> list[Problem]:
    """Problems from jsonl or parquet rows of {"id", "problem", "answer"}, all strings.

    `family` (string) and `difficulty` (number) are taken where present. Raises `ConfigError`
    naming file, row (from 1) and field for the first row that cannot be used.
    """
    path = Path(path)
    problems: list[Problem] = []
    row_of_id: dict[str, int] = {}
    for number, row in _read_problem_rows(path):
        problem = _problem_of(row, where=f"{path.name}, row {number}", integer_answers=integer_answers)
        if problem.id in row_of_id:
            raise ConfigError(
                f"{path.name}, row {number}",
                f"id {problem.id!r} is also that of row {row_of_id[problem.id]}",
                "give every problem an id of its own",
            )
        row_of_id[problem.id] = number
        problems.append(problem)
    if not problems:
        raise ConfigError(path.name, "holds no problem", 'write one {"id", "problem", "answer"} per row')
    return problems


def _read_problem_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "there is no such file"
        raise ConfigError(str(path), problem, "name an existing jsonl or parquet file")
    match path.suffix:
        case ".jsonl":
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield number, _parse(line, f"{path.name}, row {number}")
        case ".parquet":
            yield from enumerate(_read_parquet(path), start=1)
        case suffix:
            raise ConfigError(
                path.name, f"{suffix or 'no ending'} is no known format", "name a .jsonl or .parquet file"
            )


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    reader: Any = parquet
    try:
        return reader.read_table(path).to_pylist()
    except (arrow.ArrowException, OSError) as broken:
        raise ConfigError(path.name, f"is not parquet ({broken})", "write the file again") from broken


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as broken:
        raise ConfigError(where, f"is not JSON ({broken})", "write one JSON object per line") from broken


def _problem_of(row: Any, *, where: str, integer_answers: bool) -> Problem:
    if not isinstance(row, Mapping):
        raise ConfigError(where, "is not an object", 'write {"id", "problem", "answer"}')
    fields: dict[str, Any] = {str(name): value for name, value in row.items()}
    id_, problem, answer = (_text(fields, name, where) for name in ("id", "problem", "answer"))
    if integer_answers and not re.fullmatch(r"[+-]?\d+", answer):
        mend = "give an integer, or allow other answers with --no-data.integer-answers"
        raise ConfigError(where, f"answer {answer!r} is not an integer", mend)
    family, difficulty = fields.get("family") or "", fields.get("difficulty") or 0.0
    if not isinstance(family, str):
        raise ConfigError(where, f"family {family!r} is not a string", "write it in quotes")
    if isinstance(difficulty, bool) or not isinstance(difficulty, (int, float)) or not math.isfinite(difficulty):
        raise ConfigError(where, f"difficulty {difficulty!r} is not a number", "write a number or leave it out")
    return Problem(id=id_, problem=problem, answer=answer, family=family, difficulty=float(difficulty))


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if row.get(name) is None:
        raise ConfigError(where, f"has no {name}", f"add {name} as a string")
    value = row[name]
    if not isinstance(value, str):
        raise ConfigError(where, f"{name} {value!r} is not a string", "write it in quotes")
    if not value.strip():
        raise ConfigError(where, f"{name} is empty", f"fill in {name}")
    return value.strip() if name == "answer" else value
