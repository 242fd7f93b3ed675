"""Problem files: rows of a question and its true answer."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar_ray.data.columns import known_environment, known_metadata, known_reward, other_columns, plain_text
from rstar_ray.data.tables import read_table
from rstar_ray.errors import ConfigError
from rstar_ray.seeds import derive_seed
from rstar_ray.trajectory import Problem

KNOWN = ("id", "problem", "answer", "family", "difficulty", "reward", "environment", "metadata")


def load_problems(path: Path | str, *, integer_answers: bool) -> list[Problem]:
    """Problems from jsonl, json, csv or parquet rows of {"id", "problem", "answer"}; whole numbers count as text.

    `family` (string), `difficulty` (number), `reward` (the rule that judges this problem) and `environment` (that plays
    it) are taken where present. `metadata` (an object) and all other columns become the problem's metadata, which
    rewards, tools and environments read; the policy never sees it.
    Raises `ConfigError` naming file, row (from 1) and field for the first row that cannot be used.
    """
    path = Path(path)
    problems: list[Problem] = []
    row_of_id: dict[str, int] = {}
    for number, row in read_table(path):
        problem = _problem_of(row, where=f"{path.name}, row {number}", integer_answers=integer_answers)
        if problem.id in row_of_id:
            raise ConfigError(
                f"{path.name}, row {number}",
                f"id {problem.id!r} is also that of row {row_of_id[problem.id]}",
                "give every problem a unique id",
            )
        row_of_id[problem.id] = number
        problems.append(problem)
    if not problems:
        raise ConfigError(path.name, "holds no problem", 'write one {"id", "problem", "answer"} per row')
    return problems


def random_subset(problems: Sequence[Problem], count: int, *, seed: int, name: str) -> list[Problem]:
    """`count` of a file's problems at random, in the order of the file; all of them if `count` is 0.

    Files are often sorted by source or difficulty, so the first rows are a biased sample. A problem's rank depends only
    on its id: the choice stays the same if other problems are removed, and a larger `count` contains a smaller one.
    """
    if count == 0:
        return list(problems)
    ranked = sorted(problems, key=lambda problem: derive_seed(seed, name, problem.id))
    chosen = {problem.id for problem in ranked[:count]}
    return [problem for problem in problems if problem.id in chosen]


def _problem_of(row: Any, *, where: str, integer_answers: bool) -> Problem:
    if not isinstance(row, Mapping):
        raise ConfigError(where, "is not an object", 'write {"id", "problem", "answer"}')
    fields: dict[str, Any] = {str(name): value for name, value in row.items()}
    environment = known_environment(fields.get("environment"), where)
    id_, problem = _text(fields, "id", where), _text(fields, "problem", where)
    judged = bool(environment and not fields.get("answer"))  # by the environment, without a true answer
    answer = "" if judged else _text(fields, "answer", where)
    if integer_answers and not environment and not fields.get("reward") and not re.fullmatch(r"[+-]?\d+", answer):
        hint = "give an integer, or allow other answers with --data.no-integer-answers"
        raise ConfigError(where, f"answer {answer!r} is not an integer", hint)
    family = fields.get("family") or ""
    if not isinstance(family, str):
        raise ConfigError(where, f"family {family!r} is not a string", "write it in quotes")
    return Problem(
        id=id_,
        problem=problem,
        answer=answer,
        family=family,
        difficulty=_difficulty(fields.get("difficulty"), where),
        reward=known_reward(fields.get("reward"), where),
        metadata=other_columns(fields, KNOWN, where) | known_metadata(fields.get("metadata"), where),
        environment=environment,
    )


def _difficulty(value: object, where: str) -> float:
    """A number, or one as text, which is all that csv has; 0 where it is left out."""
    if value is None or value == "":
        return 0.0
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(where, f"difficulty {value!r} is not a number", "write a number or leave it out")
    return number


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if row.get(name) is None:
        hint = f"add {name} as a string, or convert the file with recipes/prepare.py"
        raise ConfigError(where, f"has no {name} (columns: {', '.join(row)})", hint)
    value = plain_text(row[name])
    if value is None:
        raise ConfigError(where, f"{name} {row[name]!r} is not a string", "write it in quotes")
    if not value.strip():
        raise ConfigError(where, f"{name} is empty", f"fill in {name}")
    return value.strip() if name == "answer" else value
