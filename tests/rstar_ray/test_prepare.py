import json
from dataclasses import replace
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_ray.data.columns import RawProblem, find_columns, raw_problem
from rstar_ray.data.overlap import near_duplicates, shared_with
from rstar_ray.data.preparation import PassRates, Rules, prepare
from rstar_ray.data.tables import read_table
from rstar_ray.errors import ConfigError

DAPO_TEXT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $2+2$?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
PUBLISHED = {  # a row as each set publishes it, and what it means
    "DAPO-Math-17k": (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": DAPO_TEXT}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        },
        ("What is $2+2$?", "4", "9a9b6eb4", 0.0),
    ),
    "AIME 2024": (
        {"ID": "2024-I-4", "Problem": "What is $2+2$?", "Solution": "It is 4.", "Answer": 4},
        ("What is $2+2$?", "4", "2024-I-4", 0.0),
    ),
    "AIME 2025": ({"question": "What is $2+2$?", "answer": "4"}, ("What is $2+2$?", "4", "", 0.0)),
    "MATH-500": (
        {"problem": "What is $2+2$?", "solution": "so $\\boxed{4}$", "answer": "4", "subject": "Algebra", "level": 2,
         "unique_id": "test/algebra/1.json"},
        ("What is $2+2$?", "4", "test/algebra/1.json", 2.0),
    ),
    "MATH": (
        {"problem": "What is $2+2$?", "level": "Level 3", "type": "Algebra", "solution": "$\\boxed{5}$: $\\boxed{4}$"},
        ("What is $2+2$?", "4", "", 3.0),
    ),
    "OpenMathReasoning": (
        {"expected_answer": "4", "problem_type": "has_answer_extracted", "problem": "What is $2+2$?",
         "generated_solution": "\\boxed{4}"},
        ("What is $2+2$?", "4", "", 0.0),
    ),
    "DeepMath": (
        {"question": "What is $2+2$?", "final_answer": "4", "difficulty": 4.5, "topic": "Mathematics -> Algebra"},
        ("What is $2+2$?", "4", "", 4.5),
    ),
    "GSM8K": (
        {"question": "What is $2+2$?", "answer": "Two and two.\n#### 1,004"},
        ("What is $2+2$?", "1004", "", 0.0),
    ),
    "integer ids": ({"id": 7, "problem": "What is $2+2$?", "answer": 4.0}, ("What is $2+2$?", "4", "7", 0.0)),
}  # fmt: skip


def row(problem: str, answer: str = "1", name: str = "") -> RawProblem:
    return RawProblem(problem=problem, answer=answer, id=name, family="", difficulty=0.0)


def kept(*rows: RawProblem, **rules) -> tuple[list[str], dict[str, int]]:
    prepared = prepare(rows, Rules(**rules), name="set")
    return [problem.id for problem in prepared.problems], prepared.dropped


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_row_is_understood_by_its_columns(name: str):
    published, meant = PUBLISHED[name]
    read = raw_problem(published, find_columns(published, where="row 1"), where="row 1")
    assert (read.problem, read.answer, read.id, read.difficulty) == meant


def test_columns_that_are_unknown_are_named_and_can_be_given():
    odd = {"aufgabe": "2+2?", "loesung": "4", "nr": 3}
    with pytest.raises(ConfigError, match=r"row 1: no column is known for a problem among aufgabe, loesung, nr"):
        find_columns(odd, where="row 1")
    with pytest.raises(ConfigError, match=r"--columns\.answer: row 1 has no 'x', only aufgabe, loesung, nr"):
        find_columns(odd, where="row 1", problem="aufgabe", answer="x")
    columns = find_columns(odd, where="row 1", problem="aufgabe", answer="loesung", id_column="nr")
    assert raw_problem(odd, columns, where="row 1").id == "3"


@pytest.mark.parametrize(("value", "what"), [([1, 2], "a list"), ({"a": 1}, "an object"), (True, "True"), (0.5, "0.5")])
def test_an_answer_that_is_not_text_is_refused_with_its_row(value: object, what: str):
    good = {"problem": "?", "answer": "1"}
    with pytest.raises(ConfigError, match=rf"row 9, answer: is {what}, not text"):
        raw_problem({"problem": "?", "answer": value}, find_columns(good, where="row 1"), where="row 9")


def test_every_row_is_kept_or_counted_under_one_reason():
    ids, dropped = kept(
        row("", name="a"),
        row("What is 1 + 0?", "", name="b"),
        row("求 1 + 0 的值", name="c"),
        row("Какое число", name="d"),
        row("What is 1/2?", r"\frac12", name="e"),
        row("What is $\\alpha$ if 1 + 0 = \\alpha?", "$1,000$", name="f"),
        english=True,
        integer_answers=True,
    )
    assert ids == ["f"]
    assert dropped == {"no problem text": 1, "no answer": 1, "not English": 2, "answer is not an integer": 1}


def test_rows_without_an_id_are_numbered_and_equal_ids_of_different_problems_distinguished():
    rows = [row("one"), row("two", name="0"), row("three", name="0"), row("four", name="0.2"), row("five", name="0")]
    assert kept(*rows)[0] == ["set-1", "0", "0.3", "0.2", "0.4"]


def test_of_problems_that_differ_in_layout_alone_the_first_stays():
    ids, dropped = kept(
        row("Find $\\left(x\\right)$ if $x = 2.$", name="a"),
        row("find (x) if \\( x=2 \\)", name="b"),
        row("other", name="c"),
    )
    assert (ids, dropped) == (["a", "c"], {"exact duplicate": 1})


def test_a_problem_with_two_answers_is_dropped_altogether():
    ids, dropped = kept(row("Find x", "1"), row("Find x.", "2"), row("Find y", "2"))
    assert (ids, dropped) == (["set-3"], {"asked twice with different answers": 2})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("1,000", "1000"),
        ("$1,000$", "+1000"),
        ("1/2", r"\frac{1}{2}"),
        (r"\dfrac12", "$0.5$"),
        (r"\frac{10}{2}", "5"),
        ("1{,}000", r"1\,000"),
        (r"\text{12}", "12"),
        ("x = 5", "5"),
        ("5", r"5\text{ cm}"),
    ],
)
def test_one_answer_in_two_spellings_is_one_answer(ours: str, theirs: str):
    for first, second in ((ours, theirs), (theirs, ours)):
        assert kept(row("Find x", first), row("Find x.", second)) == (["set-1"], {"exact duplicate": 1})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("1,000", "1,001"), ("1/2", "0.51"), (".5", "5"), ("5!", "5"), ("1,2", "(1,2)"), ("5%", "0.05")],
)
def test_answers_that_are_not_equal_as_mathematics_are_different_ones(ours: str, theirs: str):
    assert kept(row("Find x", ours), row("Find x.", theirs))[1] == {"asked twice with different answers": 2}


def test_answers_that_are_not_judged_as_mathematics_are_compared_by_their_words():
    asked = [replace(row("Say it", answer), reward="exact") for answer in ("1,000", "1000")]
    assert kept(*asked)[1] == {"asked twice with different answers": 2}
    same = [replace(row("Say it", answer), reward="exact") for answer in ("one  two", "One two")]
    assert kept(*same)[1] == {"exact duplicate": 1}


LONG = (
    "Let ABC be a triangle with sides of length 13 , 14 and 15 , and let D be the foot of the altitude from A . Find AD"
)


def test_near_duplicates_have_the_same_numbers_and_the_same_answer():
    reworded = LONG.replace("Find AD", "Compute AD")
    ids, dropped = kept(
        row(LONG, "12", "first"),
        row(reworded, "12", "reworded"),
        row(LONG.replace("15", "16"), "12", "another number"),
        row(LONG.replace("Find AD", "Determine AD"), "11", "another answer"),
        row(LONG.replace("Find AD", "Obtain AD"), "12.0", "another spelling"),
    )
    assert ids == ["first", "another number", "another answer"] and dropped == {"near duplicate": 2}


def test_marks_that_mean_something_make_another_problem():
    asked = {
        "Compute 5! today": "120", "Compute 5 today": "5", "Is 2:3 a ratio": "1", "Is 2 3 a ratio": "1",
        "Compute: 5\\!\\,000 today": "5000", "Compute 5000 today": "2",
    }  # fmt: skip
    problems = [row(problem, answer) for problem, answer in asked.items()]
    ids, dropped = kept(*problems)
    assert len(ids) == len(problems) and not dropped
    assert kept(row("Is 2:3 a ratio"), row("Is 2 : 3 a ratio"))[1] == {"exact duplicate": 1}


def test_chinese_and_japanese_problems_are_compared_by_character():
    exam = "某工厂生产甲乙两种产品共一百件，甲产品每件利润三元，乙产品每件利润五元，求总利润最大值是多少。"
    stock = "求实数a的取值范围"
    rows = [row(f"题目：{exam}"), row(f"若方程有两个解，{stock}。"), row("三角形の面積を求めよ。")]
    ids, dropped = kept(*rows, against={"exam": [exam, f"已知函数单调递增，{stock}。"]})
    assert ids == ["set-2", "set-3"] and dropped == {"shares 8 words in a row with exam": 1}


WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=14), max_size=8), st.lists(st.sampled_from(WORDS), max_size=14)
)
def test_shared_words_in_a_row_are_found_as_a_plain_search_finds_them(texts: list[list[str]], reference: list[str]):
    def shares(text: list[str]) -> bool:
        if len(reference) < 4:
            return bool(text) and text == reference
        grams = {tuple(reference[i : i + 4]) for i in range(len(reference) - 3)}
        return any(tuple(text[i : i + 4]) in grams for i in range(len(text) - 3))

    found = shared_with([" ".join(text) for text in texts], {"exam": [" ".join(reference)]}, size=4)
    assert [bool(name) for name in found] == [shares(text) for text in texts]


def test_a_problem_that_an_evaluation_set_holds_is_dropped_and_the_set_named():
    against = {"aime": [LONG], "other": ["nothing alike"]}
    ids, dropped = kept(row("Once: " + LONG.lower()), row("Nothing alike!"), row("Another problem"), against=against)
    assert ids == ["set-3"]
    assert dropped == {"shares 8 words in a row with aime": 1, "shares 8 words in a row with other": 1}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), max_size=10))
def test_a_near_duplicate_points_to_an_earlier_text_that_is_alike_and_equal_texts_always_meet(texts: list[list[str]]):
    first = near_duplicates(texts, [0] * len(texts))
    for index, other in enumerate(first):
        assert other <= index
        assert first[other] == other
        assert first[texts.index(texts[index])] == other  # equal texts end at the same one


def test_a_policys_results_keep_what_is_neither_too_hard_nor_too_easy():
    rates = PassRates(solved={"a": 1, "b": 2, "c": 7, "d": 8}, at_least=2, at_most=7)
    rows = [row(name, name=name) for name in "abcde"]
    ids, dropped = kept(*rows, pass_rates=rates)
    assert ids == ["b", "c"]
    assert dropped == {
        "solved fewer than 2 times": 1,
        "solved more than 7 times": 1,
        "no result in the pass rates": 1,
    }


def test_every_format_gives_the_same_rows(tmp_path: Path):
    rows = [{"id": "a", "problem": "x, y\nz", "answer": "1"}, {"id": "b", "problem": "é", "answer": "2"}]
    (tmp_path / "t.jsonl").write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows) + "\n", "utf-8")
    (tmp_path / "t.json").write_text(json.dumps(rows))
    (tmp_path / "t.csv").write_text('id,problem,answer\na,"x, y\nz",1\nb,é,2\n', "utf-8-sig")
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    for suffix in ("jsonl", "json", "csv", "parquet"):
        assert [read for _, read in read_table(tmp_path / f"t.{suffix}")] == rows, suffix
    assert [number for number, _ in read_table(tmp_path / "t.jsonl")] == [1, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"a": 1}\n{"a"', "t.jsonl, row 2: is not JSON"),
        ("t.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "t.jsonl, row 2: is not JSON"),
        ("t.json", b'{"a": 1}', "t.json: is not a list"),
        ("t.json", b"[", "t.json: is not JSON"),
        ("t.csv", b"a,b\n1,2\n\xe9,3\n", "t.csv, row .: is not UTF-8. Hint: save"),
        ("t.csv", b"a,b\n1,2\n1,2,3\n", "t.csv, row 2: has more cells than the header"),
        ("t.parquet", b"PAR1 and no more", "t.parquet: is not parquet"),
        ("t.txt", b"", "t.txt: .txt is not a known format"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_with_its_row(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(read_table(tmp_path / name))
