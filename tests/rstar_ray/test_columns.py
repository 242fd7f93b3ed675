"""Columns of problem files made by others, and problem files in this repository's format."""

import json
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.data.columns import Columns, RawProblem, find_columns, raw_problem
from rstar_ray.data.problems import load_problems
from rstar_ray.errors import ConfigError
from rstar_ray.trajectory import Problem


def row(problem: str, answer: str = "1", name: str = "") -> RawProblem:
    return RawProblem(problem=problem, answer=answer, id=name, family="f", difficulty=2.5)


# -- columns -----------------------------------------------------------------------------------------------------------


def read(fields: dict[str, Any], **named: str) -> RawProblem:
    return raw_problem(fields, find_columns(fields, where="row 1", **named), where="row 1")


def test_a_separate_answer_goes_before_a_solutions_box():
    fields = {"problem": "?", "answer": "3", "solution": r"\boxed{4}"}
    assert read(fields).answer == "3"
    assert read({"problem": "?", "solution": r"\boxed{4}"}).answer == "4"
    with pytest.raises(ConfigError, match="no column is known for an answer among problem, solution"):
        find_columns({"problem": "?", "solution": "four"}, where="row 1")
    assert (
        str(find_columns(fields | {"id": 1, "level": "Level 2"}, where="r"))
        == "problem, answer, id as id, level as difficulty"
    )
    assert str(Columns(problem="p", answer="a")) == "p, a"


def test_of_messages_the_last_of_the_user_is_the_problem():
    said = [{"role": "system", "content": "s"}, {"content": "first"}, {"role": "user", "content": "last"}, "odd",
            {"role": "assistant", "content": "no"}]  # fmt: skip
    assert read({"prompt": said, "answer": "1"}).problem == "last"
    with pytest.raises(ConfigError, match=r"row 1, prompt: is a list, not text"):
        read({"prompt": [{"role": "assistant", "content": "no"}], "answer": "1"})


def test_an_answer_after_hashes_counts_where_a_line_stands_before_it():
    assert read({"problem": "?", "answer": "so\n#### 1,234 "}).answer == "1234"
    assert read({"problem": "?", "answer": "a #### 1,2"}).answer == "a #### 1,2"
    assert read({"problem": "?", "answer": "a\n#### 1\n#### 2"}).answer == "2"


@pytest.mark.parametrize(
    ("value", "difficulty"),
    [
        (3, 3.0),
        (True, 0.0),
        ("Level 4", 4.0),
        ("level5", 5.0),
        ("2.5", 2.5),
        ("hard", 0.0),
        ("Level", 0.0),
        (None, 0.0),
    ],
)
def test_a_level_is_a_number_wherever_it_is_written(value: Any, difficulty: float):
    assert read({"problem": "?", "answer": "1", "level": value}).difficulty == difficulty


def test_names_are_found_in_any_case_and_inside_objects():
    fields = {"PROBLEM": "?", "reward_model": {"Ground_Truth": 7}, "extra_info": {"index": 3}, "subject": "S"}
    assert read(fields) == RawProblem(problem="?", answer="7", id="3", family="S", difficulty=0.0)
    assert read({"problem": "?", "answer": None, "target": "t"}).answer == "t"
    with pytest.raises(ConfigError, match="is not an object"):
        find_columns([], where="row 1")
    with pytest.raises(ConfigError, match="is not an object"):
        raw_problem([], Columns(problem="p", answer="a"), where="row 1")
    with pytest.raises(ConfigError, match="among none"):
        find_columns({}, where="row 1")


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_problem_file_is_taken_as_it_is_written(tmp_path: Path):
    rows = [
        {"id": 7, "problem": " p ", "answer": " +12 "},
        {"id": "b", "problem": "q", "answer": -3, "family": "f", "difficulty": 2},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert load_problems(path, integer_answers=True) == [
        Problem(id="7", problem=" p ", answer="+12", family="", difficulty=0.0),
        Problem(id="b", problem="q", answer="-3", family="f", difficulty=2.0),
    ]
    path.write_text(path.read_text() * 2)
    with pytest.raises(ConfigError, match=r"a\.jsonl, row 3: id '7' is also that of row 1"):
        load_problems(path, integer_answers=True)
    for wrong in ({"difficulty": True}, {"difficulty": 1e999}, {"family": 3}, {"problem": " "}, {"answer": 1.5}):
        path.write_text(json.dumps(rows[1] | wrong) + "\n")
        with pytest.raises(ConfigError, match=rf"row 1: {next(iter(wrong))}"):
            load_problems(path, integer_answers=False)
