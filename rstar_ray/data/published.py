"""Published sets in other forms: GPQA, IFEval, BFCL, and multiple choice.

Each is recognised by its columns, and becomes problems that name their reward rule.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any, cast

from rstar_ray.data.columns import RawProblem, plain_text
from rstar_ray.errors import ConfigError

Form = Callable[[Mapping[str, Any], str, Mapping[str, Any]], RawProblem]
"""Converts (row, its place, answers by id from a separate file) to the problem. Raises `ConfigError`."""
WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
ASKS_FOR_LETTER = "Answer with the letter of the right choice."
ASKS_FOR_CALLS = (
    "These functions can be called, each with its arguments as a JSON schema:\n{functions}\n\n"
    "Write the calls that answer the request as a list of Python calls with named arguments, such as "
    '[first(a=1), second(b="x")], in a fenced block. Where no function fits, or an argument that is needed is not '
    "known, say so and write no call.\n\nThe request: {request}"
)


def published_form(row: Any) -> Form | None:
    """The converter for a set, recognised by one of its rows; None for a set of questions and answers."""
    if not isinstance(row, Mapping):
        return None
    fields = cast(Mapping[str, Any], row)
    found = next((form for needed, form in FORMS if needed <= set(fields)), None)
    if found is _choices and not isinstance(fields.get("choices", fields.get("options")), list):
        return None
    return found


def _gpqa(row: Mapping[str, Any], where: str, _: Mapping[str, Any]) -> RawProblem:
    """GPQA: four choices are put in a random order for each row; judged by choice"""
    right, *wrong = (_text(row, name, where) for name in ("Correct Answer", *WRONG))
    question = _text(row, "Question", where)
    name = plain_text(row.get("Record ID")) or ""
    choices = [right, *wrong]
    random.Random(f"gpqa {name or question}").shuffle(choices)  # the same for everybody, and not always A
    return RawProblem(
        problem=_lettered(question, choices),
        answer=ascii_uppercase[choices.index(right)],
        id=name,
        family=str(row.get("High-level domain") or ""),
        reward="choice",
    )


def _choices(row: Mapping[str, Any], where: str, _: Mapping[str, Any]) -> RawProblem:
    """choices with letters before them; judged by choice"""
    column = "choices" if "choices" in row else "options"
    choices = cast(list[Any], row[column])
    if not isinstance(row[column], list) or not 2 <= len(choices) <= len(ascii_uppercase):
        raise ConfigError(f"{where}, {column}", "is not a list of choices", "write two to 26 of them")
    answer = row.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        answer = ascii_uppercase[answer]
    if not isinstance(answer, str) or answer not in ascii_uppercase[: len(choices)] or not answer:
        raise ConfigError(
            f"{where}, answer", f"{answer!r} is not one of the choices", "give a letter, or a place from 0"
        )
    question = _text(row, "question", where)
    name = plain_text(row.get("id", row.get("question_id"))) or ""
    family = str(row.get("subject") or row.get("category") or "")
    return RawProblem(
        problem=_lettered(question, [str(one) for one in choices]),
        answer=answer,
        id=name,
        family=family,
        reward="choice",
    )


def _lettered(question: str, choices: Sequence[str]) -> str:
    listed = "\n".join(f"({letter}) {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))
    return f"{question}\n\n{listed}\n\n{ASKS_FOR_LETTER}"


def _ifeval(row: Mapping[str, Any], where: str, _: Mapping[str, Any]) -> RawProblem:
    """IFEval: verifiable instructions; judged by instructions"""
    names, asked = row["instruction_id_list"], row["kwargs"]
    if (
        not isinstance(names, list)
        or not isinstance(asked, list)
        or len(cast(list[Any], names)) != len(cast(list[Any], asked))
        or not all(one is None or isinstance(one, dict) for one in cast(list[Any], asked))
    ):
        raise ConfigError(
            f"{where}, kwargs", "does not fit instruction_id_list", "give one object for each instruction"
        )
    instructions = [
        {"name": str(name), "kwargs": {key: value for key, value in (one or {}).items() if value is not None}}
        for name, one in zip(cast(list[Any], names), cast(list[Any], asked), strict=True)
    ]
    return RawProblem(
        problem=_text(row, "prompt", where),
        answer=json.dumps(instructions, ensure_ascii=False),
        id=plain_text(row.get("key")) or "",
        family=str(instructions[0]["name"]).partition(":")[0] if instructions else "",
        reward="instructions",
    )


def _bfcl(row: Mapping[str, Any], where: str, apart: Mapping[str, Any]) -> RawProblem:
    """BFCL: functions are shown in the question, calls are written down; judged by calls"""
    name = plain_text(row.get("id")) or ""
    functions = row["function"] if isinstance(row["function"], list) else [row["function"]]
    truth = row.get("ground_truth", apart.get(name))
    if truth is None and "irrelevance" not in name:
        raise ConfigError(f"{where}, id", f"{name!r} has no ground_truth", "name the file of answers with --answers")
    wanted: list[dict[str, Any]] = []
    for call in cast(list[Any], truth or []) if isinstance(truth, list | None) else [truth]:
        if not isinstance(call, dict) or len(cast(dict[str, Any], call)) != 1:
            raise ConfigError(
                f"{where}, ground_truth", "is not a list of calls", 'write [{"name": {"argument": [values]}}]'
            )
        ((function, arguments),) = cast(dict[str, Any], call).items()
        wanted.append({"name": function, "arguments": arguments})
    return RawProblem(
        problem=ASKS_FOR_CALLS.format(
            functions="\n".join(json.dumps(one, ensure_ascii=False) for one in cast(list[Any], functions)),
            request=_request(row["question"], where),
        ),
        answer=json.dumps(wanted, ensure_ascii=False),
        id=name,
        family=name.rpartition("_")[0],
        reward="calls",
    )


def _bfcl_turns(row: Mapping[str, Any], where: str, _: Mapping[str, Any]) -> RawProblem:
    """BFCL of several turns: its calls are answered by services that it simulates"""
    what = "is of several turns, whose calls are answered by services that BFCL simulates and this project has not"
    raise ConfigError(f"{where}, involved_classes", what, "leave BFCL's multi_turn files out")


def _request(question: Any, where: str) -> str:
    """The text of a single turn: text, messages, or turns of messages with only one turn."""
    while isinstance(question, list) and len(cast(list[Any], question)) == 1 and isinstance(question[0], list):
        question = question[0]
    if isinstance(question, str):
        return question
    said = list(cast(list[Any], question)) if isinstance(question, list) else []
    if not said or not all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in said):
        raise ConfigError(f"{where}, question", "is not a single turn", "leave sets of several turns out")
    return "\n\n".join(cast(dict[str, str], one)["content"] for one in said)


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    text = plain_text(row.get(name))
    if text is None or not text.strip():
        raise ConfigError(f"{where}, {name}", "is not text", "fill it in, or leave the row out")
    return text.strip()


ANSWERED_APART: tuple[Form, ...] = (_bfcl, _bfcl_turns)
"""Sets that may have their answers in a separate file."""
FORMS: tuple[tuple[set[str], Form], ...] = (
    ({"Question", "Correct Answer", *WRONG}, _gpqa),
    ({"prompt", "instruction_id_list", "kwargs"}, _ifeval),
    ({"question", "involved_classes"}, _bfcl_turns),
    ({"question", "function"}, _bfcl),
    ({"question", "choices", "answer"}, _choices),
    ({"question", "options", "answer"}, _choices),
)
"""The columns that identify a set."""
