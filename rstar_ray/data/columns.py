r"""Maps the columns of published problem sets to problems.

Recognised by their columns: DAPO-Math-17k (`prompt` as messages, `reward_model.ground_truth`), its processed
form, AIME 2024 and 2025 (`Problem` or `question`, `Answer`), MATH and MATH-500 (`problem`, `solution` with a
`\boxed{}`, `unique_id`), OpenMathReasoning (`expected_answer`), DeepMath (`question`, `final_answer`), GSM8K
(`answer` after `####`).
"""

import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rstar_ray.config.own_code import REWARDS, is_entry, is_reward
from rstar_ray.errors import ConfigError
from rstar_ray.reward.find import last_boxed

PROBLEM_COLUMNS = ("problem", "question", "prompt", "query")
ANSWER_COLUMNS = ("answer", "expected_answer", "final_answer", "reward_model.ground_truth", "ground_truth", "target")
ID_COLUMNS = ("id", "unique_id", "uuid", "problem_id", "problem_idx", "extra_info.index", "index", "idx")
FAMILY_COLUMNS = ("family", "subject", "topic", "problem_source")
DIFFICULTY_COLUMNS = ("difficulty", "level")
MAX_METADATA_CHARS = 65_536
"""Most JSON characters of a row's other columns: they travel with every rollout of the problem."""
MATHEMATICS = ("", "math")
"""What a row names as its reward where its answer is one of mathematics, such as every row of the sets above."""
_DAPO_FRAME = re.compile(
    r"\s*Solve the following math problem step by step\..*?\(without quotes\)[^\n]*\n+(.*?)"
    r"\s*Remember to put your answer on its own line after .Answer:.\.?\s*",
    re.DOTALL,
)
_LEVEL = re.compile(r"(?:level\s*)?(\d+(?:\.\d+)?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns that a set uses; dots lead into objects. Empty: the set has no such column."""

    problem: str
    answer: str
    id: str = ""
    family: str = ""
    difficulty: str = ""

    def __str__(self) -> str:
        named = {"id": self.id, "family": self.family, "difficulty": self.difficulty}
        others = [f"{column} as {name}" for name, column in named.items() if column]
        return ", ".join([self.problem, self.answer, *others])


@dataclass(frozen=True, slots=True, kw_only=True)
class RawProblem:
    """A row as it was read, not yet judged. Empty where the row has no such field."""

    problem: str
    answer: str
    id: str
    family: str = ""
    difficulty: float = 0.0
    reward: str = ""  # the rule that judges it
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: str = ""


def find_columns(row: Any, *, where: str, problem: str = "", answer: str = "", id_column: str = "") -> Columns:
    """The columns of a set by one of its rows; a name that is given is taken.

    Raises `ConfigError` naming the columns there are where none of them can be the problem or the answer.
    """
    fields = _fields(row, where)
    for option, name in (("--columns.problem", problem), ("--columns.answer", answer), ("--columns.id", id_column)):
        if name and _value(fields, name) is None:
            raise ConfigError(option, f"{where} has no {name!r}, only {_names(fields)}", "name one of these")
    problem = problem_column(fields, problem, where=where)
    answer = answer or _first(fields, ANSWER_COLUMNS)
    if not answer and last_boxed(str(fields.get("solution") or "")) is not None:
        answer = "solution"
    if not answer:
        raise ConfigError(where, f"no column is known for an answer among {_names(fields)}", "name --columns.answer")
    return Columns(
        problem=problem,
        answer=answer,
        id=id_column or _first(fields, ID_COLUMNS),
        family=_first(fields, FAMILY_COLUMNS),
        difficulty=_first(fields, DIFFICULTY_COLUMNS),
    )


def problem_column(row: Any, wanted: str, *, where: str) -> str:
    """The column of the problem's text: `wanted` where the row has it, else a known name. Raises `ConfigError`."""
    fields = _fields(row, where)
    column = wanted if wanted and _value(fields, wanted) is not None else _first(fields, PROBLEM_COLUMNS)
    if not column:
        raise ConfigError(where, f"no column is known for a problem among {_names(fields)}", "name --columns.problem")
    return column


def question_text(row: Any, column: str, *, where: str) -> str:
    """The question of a row: a text, the last user message of messages, or the user messages of all turns (BFCL)."""
    value = _value(_fields(row, where), column)
    turns = cast(list[Any], value) if isinstance(value, list) else []
    if turns and all(isinstance(turn, list) for turn in turns):
        return "\n\n".join(_problem_text(turn, f"{where}, {column}") for turn in turns)
    return _problem_text(value, f"{where}, {column}")


def raw_problem(row: Any, columns: Columns, *, where: str) -> RawProblem:
    """One row by its columns, and the `reward` that it names.

    Raises `ConfigError` for a row that is not an object, holds a list where text belongs, or names an unknown rule.
    """
    fields = _fields(row, where)
    named = _value(fields, "reward")  # looked for in every row: in mixed sets only some rows name one
    reward = known_reward(named.strip(), where) if isinstance(named, str) else ""  # in some sets it is a numeric score
    answer = _value(fields, columns.answer)
    environment = _value(fields, "environment")  # in some sets the column has another meaning
    return RawProblem(
        problem=_problem_text(_value(fields, columns.problem), f"{where}, {columns.problem}"),
        answer=_answer_text(answer, columns.answer, f"{where}, {columns.answer}", reward=reward),
        id=_plain(_value(fields, columns.id), f"{where}, {columns.id}") if columns.id else "",
        family=str(_value(fields, columns.family) or "") if columns.family else "",
        difficulty=_difficulty(_value(fields, columns.difficulty)) if columns.difficulty else 0.0,
        reward=reward,
        metadata=_metadata(fields),
        environment=environment if isinstance(environment, str) and is_entry(environment) else "",
    )


def _fields(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigError(where, "is not an object", "write one object per row")
    return cast(Mapping[str, Any], row)


def _metadata(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The object in the set's column; other values are ignored."""
    try:
        return known_metadata(_value(fields, "metadata"), "")
    except ConfigError:
        return {}


def known_reward(named: object, where: str) -> str:
    """The rule, or the user's `module:function`, that a row names; it may name none. Raises `ConfigError` otherwise."""
    if named is None or named == "":
        return ""
    if not isinstance(named, str) or not is_reward(named):
        hint = f"give {', '.join(REWARDS)} or module:function, or leave it out"
        raise ConfigError(where, f"reward {named!r} is unknown", hint)
    return named


def known_environment(named: object, where: str) -> str:
    """The `module:object` that a row names as its environment; it may name none. Raises `ConfigError` otherwise."""
    if named is None or named == "":
        return ""
    if not isinstance(named, str) or not is_entry(named):
        raise ConfigError(where, f"environment {named!r} is not module:object", "name one of --tools.environments")
    return named


def other_columns(fields: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    """A row's columns that are not `known`, without empty ones and those that JSON cannot hold, such as dates.

    Raises `ConfigError` where they are longer than `MAX_METADATA_CHARS`.
    """
    found: dict[str, Any] = {}
    for name in fields.keys() - set(known):
        try:
            text = json.dumps(fields[name], allow_nan=False)
        except (TypeError, ValueError):
            continue
        if text != "null":
            found[name] = json.loads(text)
    size = sum(len(name) + len(json.dumps(value, ensure_ascii=False)) for name, value in found.items())
    if size > MAX_METADATA_CHARS:
        problem = f"its other columns hold {size:,} characters, above {MAX_METADATA_CHARS:,}"
        raise ConfigError(where, f"{problem} ({', '.join(sorted(found))})", "remove the columns that nothing reads")
    return dict(sorted(found.items()))


def known_metadata(value: object, where: str) -> dict[str, Any]:
    """The row's free field, which rewards, tools and environments may read: an object, or one as JSON text, which suits
    csv and parquet. Raises `ConfigError` for anything else.
    """
    if value is None or value == "":
        return {}
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if isinstance(found, Mapping):
            return json.loads(json.dumps(found, allow_nan=False))
        problem = f"metadata is {type(found).__name__}, not an object"
    except (TypeError, ValueError) as wrong:
        problem = f"metadata is not JSON ({wrong})"
    raise ConfigError(where, problem, "write a JSON object, or give the column another name")


def plain_text(value: object) -> str | None:
    """Text, or a whole number as text (ids and answers are often kept as numbers); None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() else None


def _plain(value: object, where: str) -> str:
    if value is None:
        return ""
    text = plain_text(value)
    if text is None:
        kind = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else repr(value)
        raise ConfigError(where, f"is {kind}, not text", "name a column of text, or write it as a string")
    return text.strip()


def _problem_text(value: object, where: str) -> str:
    """The text of a problem; of messages the last user message, without DAPO's instructions around it."""
    if isinstance(value, list):
        messages = [cast(Mapping[str, Any], message) for message in cast(list[Any], value) if isinstance(message, dict)]
        said = [message.get("content") for message in messages if message.get("role", "user") == "user"]
        value = said[-1] if said else value
    text = _plain(value, where)
    framed = _DAPO_FRAME.fullmatch(text)
    return framed[1].strip() if framed else text


def _answer_text(value: object, column: str, where: str, *, reward: str) -> str:
    text = _plain(value, where)
    if column == "solution":
        return last_boxed(text) or ""
    if reward not in MATHEMATICS:  # a program's cases may have any marks in them
        return text
    before, marked, after = text.rpartition("####")  # GSM8K's
    return after.strip().replace(",", "") if marked and "\n" in before else text


def _difficulty(value: object) -> float:
    if isinstance(value, bool):
        return 0.0
    if isinstance(value, int | float):
        return float(value) if abs(value) <= sys.float_info.max else 0.0  # also for nan
    match = _LEVEL.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(match[1]) if match else 0.0


def _value(fields: Mapping[str, Any], column: str) -> Any:
    """The value of a column, whatever the case of its name; dots lead into objects."""
    value: Any = fields
    for name in column.split("."):
        if not isinstance(value, Mapping):
            return None
        inner = cast(Mapping[str, Any], value)
        value = inner[name] if name in inner else next((inner[k] for k in inner if k.lower() == name.lower()), None)
    return value


def _first(fields: Mapping[str, Any], columns: tuple[str, ...]) -> str:
    return next((column for column in columns if _value(fields, column) is not None), "")


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(fields) or "none"
