"""Files of strangers at their edges: columns, rows, reasons, problem files."""

import json
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.data.columns import Columns, RawProblem, find_columns, plain_text, raw_problem
from rstar_ray.data.order import DataPosition
from rstar_ray.data.prepare import PassRates, Prepared, Rules, prepare
from rstar_ray.data.problems import load_problems
from rstar_ray.data.tables import read_table
from rstar_ray.errors import ConfigError
from rstar_ray.trajectory import Problem


def row(problem: str, answer: str = "1", name: str = "") -> RawProblem:
    return RawProblem(problem=problem, answer=answer, id=name, family="f", difficulty=2.5)


def prepared(*rows: RawProblem, **rules: Any) -> Prepared:
    return prepare(rows, Rules(**rules), name="set")


def test_without_rules_everything_with_a_problem_and_an_answer_is_kept():
    found = prepared(row("求 1"), row("x" * 99_999, "a b"), row(" ", "1"), row("?", " "))
    assert found.problems == [
        Problem(id="set-1", problem="求 1", answer="1", family="f", difficulty=2.5),
        Problem(id="set-2", problem="x" * 99_999, answer="a b", family="f", difficulty=2.5),
    ]
    assert (found.read, found.dropped) == (4, {"no problem text": 1, "no answer": 1})
    assert prepared() == Prepared(problems=[], read=0, dropped={})
    assert DataPosition() == DataPosition(epoch=0, drawn=0)


def test_the_longest_problem_that_is_kept_has_just_so_many_characters():
    found = prepared(row("abcde"), row("abcdef"), max_chars=5)
    assert [one.problem for one in found.problems] == ["abcde"] and found.dropped == {"longer than 5 characters": 1}


def test_a_pass_rate_at_either_end_is_kept_and_an_unknown_problem_is_not():
    solved = {"a": 1, "b": 2, "c": 3, "d": 4}
    rates = PassRates(solved=solved, at_least=2, at_most=3)
    found = prepared(*[row(name, name=name) for name in "abcde"], pass_rates=rates)
    assert [one.id for one in found.problems] == ["b", "c"] and sum(found.dropped.values()) == 3


def test_layout_is_no_difference_and_a_number_is():
    found = prepared(row("What is $2 + 3$?"), row("what  is \\( 2+3 \\)"), row("What is $2 + 4$?"))
    assert [one.id for one in found.problems] == ["set-1", "set-3"] and sum(found.dropped.values()) == 1
    kept = prepared(row("same"), row("same"), duplicates=False)
    assert [one.id for one in kept.problems] == ["set-1", "set-2"]
    twice = prepared(row("same", "1"), row("same", "2"), row("other"), row("same", "1"))
    assert [one.id for one in twice.problems] == ["set-3"]
    assert twice.dropped == {"asked twice with different answers": 3}


def test_words_shared_with_an_evaluation_set_are_counted_to_the_word():
    exam = {"exam": ["one two three four five six seven eight nine"]}
    seven, eight = "zero one two three four five six seven", "zero one two three four five six seven eight"
    found = prepared(row(seven), row(eight), against=exam)
    assert [one.problem for one in found.problems] == [seven]
    assert prepared(row(seven), against=exam, ngram_words=7).dropped == {"shares 7 words in a row with exam": 1}


# -- columns -----------------------------------------------------------------------------------------------------------


def read(fields: dict[str, Any], **named: str) -> RawProblem:
    return raw_problem(fields, find_columns(fields, where="row 1", **named), where="row 1")


def test_an_answer_of_its_own_goes_before_a_solutions_box():
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


def test_whole_numbers_are_text():
    assert [plain_text(value) for value in ("a", 3, 3.0, 3.5, True, None, [])] == [
        "a",
        "3",
        "3",
        None,
        None,
        None,
        None,
    ]


# -- files -------------------------------------------------------------------------------------------------------------


def test_rows_are_numbered_by_line_or_by_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"a": 1}\n\n  \n{"a": 2}\n', "utf-8")
    assert list(read_table(tmp_path / "a.jsonl")) == [(1, {"a": 1}), (4, {"a": 2})]
    (tmp_path / "a.json").write_text('[{"a": 1}, 2]')
    assert list(read_table(tmp_path / "a.json")) == [(1, {"a": 1}), (2, 2)]
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n")
    assert list(read_table(tmp_path / "a.csv")) == [(1, {"a": "1", "b": "2"}), (2, {"a": "3", "b": "4"})]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", "a.csv, row 2: has more cells than the header"),
        ("a.csv", 'a,b\n1,2\n"1,2\n', "a.csv, row 2: is not csv"),
        ("a.csv", "a\n1\n\xff\n", "a.csv, row 1: is not UTF-8"), ("a.json", "{}", "a.json: is no list"),
        ("a.jsonl", '{"a": 1}\n{\n', "a.jsonl, row 2: is not JSON"), ("a.txt", "", r"a.txt: \.txt is no known format"),
        ("a", "", "a: no ending is no known format"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_row(tmp_path: Path, name: str, content: str, said: str):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=said):
        list(read_table(tmp_path / name))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no such file"):
        read_table(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="is a directory"):
        read_table(tmp_path)


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
