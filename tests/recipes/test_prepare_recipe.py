import json
from pathlib import Path

import pytest

from recipes.prepare import main
from rstar_ray.data.problems import load_problems
from rstar_ray.reward.reward_calls import read_wanted, same_calls
from rstar_ray.reward.verifiable import read_instructions
from rstar_ray.trajectory import Problem


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_several_sources_are_one_set_whose_columns_may_differ(tmp_path: Path):
    folder = tmp_path / "shards"
    folder.mkdir()
    write(folder / "0.jsonl", {"problem": "first", "answer": "1"})
    write(folder / "1.jsonl", {"problem": "second", "answer": "2"})
    other = write(tmp_path / "other.jsonl", {"Problem": "third", "Answer": 3}, {"Problem": "first", "Answer": 1})
    main([str(folder), other, "--out", str(tmp_path / "out.jsonl")])
    assert [problem.answer for problem in load_problems(tmp_path / "out.jsonl", integer_answers=True)] == [
        "1",
        "2",
        "3",
    ]


def test_a_rows_own_reward_is_kept_and_integers_are_asked_of_mathematics_alone(tmp_path: Path):
    cases = json.dumps([{"input": "1\n", "output": "####\n1,000"}], indent=1)
    source = write(
        tmp_path / "mixed.jsonl",
        {"problem": "first", "answer": "1,000"},
        {"problem": "second", "answer": "B", "reward": "choice"},
        {"problem": "third", "answer": cases, "reward": "code"},
        {"problem": "fourth", "answer": "1,000", "reward": "exact"},
        {"problem": "fifth", "answer": "1,000", "reward": "math"},
        {"problem": "sixth", "answer": "1/2", "reward": "math"},
        {"problem": "seventh", "answer": "7", "reward": 0.5},
    )
    for suffix in ("jsonl", "parquet"):
        main([source, "--out", str(tmp_path / f"out.{suffix}"), "--integer-answers"])
        problems = load_problems(tmp_path / f"out.{suffix}", integer_answers=True)
        assert [(problem.problem, problem.answer, problem.reward) for problem in problems] == [
            ("first", "1000", ""),
            ("second", "B", "choice"),
            ("third", cases, "code"),
            ("fourth", "1,000", "exact"),
            ("fifth", "1000", "math"),
            ("seventh", "7", ""),
        ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_metadata_and_the_functions_that_rows_name_are_kept(suffix: str, tmp_path: Path):
    rows = [
        {"problem": "none", "answer": "8"},
        {"problem": "first", "answer": "7", "metadata": {"points": 3}},
        {"problem": "second", "answer": "a text", "reward": "mine:close", "metadata": {"points": "many"}},
        {"problem": "third", "answer": "5", "metadata": "from somewhere"},
        {"problem": "fourth", "answer": "6", "environment": "mine:Game"},
    ]
    source = write(tmp_path / "raw.jsonl", *rows)
    main([source, "--out", str(tmp_path / f"set.{suffix}")])
    problems = load_problems(tmp_path / f"set.{suffix}", integer_answers=False)
    assert [(one.reward, one.metadata) for one in problems] == [
        ("", {}),
        ("", {"points": 3}),
        ("mine:close", {"points": "many"}),
        ("", {}),
        ("", {}),
    ]
    assert [one.environment for one in problems] == ["", "", "", "", "mine:Game"]


SEVEN = "How many of the seven numbers are even and"


def test_problems_of_every_evaluation_set_are_dropped_also_of_sets_of_equal_names_and_without_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    gpqa = {"Question": f"{SEVEN} three?"}
    bfcl = {"id": "simple_0", "function": [], "question": [[{"role": "user", "content": f"{SEVEN} four?"}]]}
    against = [
        write(tmp_path / "a" / "test.jsonl", {"question": f"{SEVEN} one?"}),
        write(tmp_path / "b" / "test.jsonl", {"words": f"{SEVEN} two?", "answer": None}),
        write(tmp_path / "gpqa.jsonl", gpqa),
        write(tmp_path / "bfcl.jsonl", bfcl),
    ]
    rows = [{"words": f"{SEVEN} {number}?", "answer": "1"} for number in ("one", "two", "three", "four", "five")]
    options = ["--against-words", "10", "--columns.problem", "words", "--check", "--keep-duplicates"]
    main([write(tmp_path / "p.jsonl", *rows), *options, "--against", *against])
    said = capsys.readouterr().out
    assert [said.count(f"shares 10 words in a row with {name}") for name in (*against[:2], "gpqa", "bfcl")] == [1] * 4
    assert "1  kept" in said


def test_choices_do_not_share_the_words_that_ask_for_a_letter(tmp_path: Path):
    mine = {"question": "Which?", "choices": ["a", "b"], "answer": 0}
    theirs = {"question": "Where to?", "choices": ["c", "d"], "answer": 1}
    against = write(tmp_path / "mmlu.jsonl", theirs)
    assert len(prepared(tmp_path, write(tmp_path / "p.jsonl", mine), "--against", against)) == 1


def test_of_a_folder_counts_and_hidden_files_are_not_read(tmp_path: Path):
    source = write(tmp_path / "p.jsonl", {"problem": "?", "answer": "1"})
    (tmp_path / "sets" / ".cache").mkdir(parents=True)
    (tmp_path / "sets" / ".cache" / "x.json").write_text("{}")
    assert main([source, "--out", str(tmp_path / "sets" / "train.jsonl")]) == 0
    assert main([str(tmp_path / "sets"), "--out", str(tmp_path / "again.jsonl")]) == 0
    assert len(load_problems(tmp_path / "again.jsonl", integer_answers=True)) == 1


def test_a_folder_that_refuses_files_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write(tmp_path / "p.jsonl", {"problem": "?", "answer": "1"})
    assert main([source, "--out", "/proc/x.jsonl"]) == 1
    assert capsys.readouterr().err.startswith("error: FileNotFoundError: ")


def test_pass_rates_are_read_as_an_evaluation_writes_them(tmp_path: Path):
    source = write(tmp_path / "p.jsonl", *({"id": name, "problem": name, "answer": "1"} for name in ("a", "b", "c")))
    rows = [{"id": name, "num_correct": solved, "k": 16} for name, solved in (("a", 1), ("b", 2), ("c", 16))]
    rates = write(tmp_path / "rates.jsonl", *rows)
    main([source, "--out", str(tmp_path / "out.jsonl"), "--pass-rates", rates, "--solved-at-most", "15"])
    assert [problem.id for problem in load_problems(tmp_path / "out.jsonl", integer_answers=True)] == ["b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["absent.jsonl", "--check"], "absent.jsonl: there is no such file"),
        (["nothing-here", "--check"], "nothing-here: there is no such file. Hint: name an existing file or folder"),
        (["{good}"], "--out: nowhere to write. Hint: name a .jsonl or .parquet file, or give --check"),
        (["{good}", "--out", "x.txt"], "--out: x.txt is neither"),
        (["{good}", "--out", "no/such/folder/x.jsonl"], "does not exist. Hint: make the folder first"),
        (["{good}", "--check", "--integer-answers", "--max-chars", "3"], "sources: no problem is left"),
        (["{good}", "--check", "--columns.answer", "truth"], "--columns.answer: good.jsonl, row 1 has no 'truth'"),
        (["{good}", "--check", "--solved-at-most", "1"], "--solved-at-most: 1 leaves nothing to keep"),
        (["{good}", "--check", "--solved-at-most", "9"], "--solved-at-most: nothing says how often"),
        (["{good}", "--check", "--solved-at-least", "3"], "--solved-at-least: nothing says how often"),
        (
            ["{good}", "--check", "--against-words", "9"],
            "--against-words: no evaluation set is named. Hint: give --against",
        ),
        (
            ["{good}", "--check", "--answers", "{answers}"],
            "--answers: the rows of good.jsonl have their answers in them. Hint: leave it out",
        ),
        (["{list}", "--check"], "list.jsonl, row 2, answer: is a list, not text"),
        (["{empty}", "--check"], "empty.jsonl: holds no row"),
        (
            ["{odd}", "--check"],
            "odd.jsonl, row 2: reward 'choices' is unknown. Hint: give math, exact, choice, code, instructions, calls",
        ),
        (
            ["{half}", "--out", "{folder}/x.jsonl"],
            "half.jsonl, row 2: holds half a character (\\ud83d). Hint: write the text whole",
        ),
        (["{good}", "--out", "{folder}"], "--out: {folder} is a folder. Hint: name a file"),
        (["{good}", "--out", "{good}"], "--out: {good} is read from itself. Hint: name another file"),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, options: list[str], message: str, capsys
):
    names = {
        "good": write(tmp_path / "good.jsonl", {"problem": "What is 1 + 1?", "answer": "2"}),
        "list": write(tmp_path / "list.jsonl", {"problem": "?", "answer": "2"}, {"problem": "!", "answer": [1]}),
        "empty": write(tmp_path / "empty.jsonl"),
        "odd": write(
            tmp_path / "odd.jsonl",
            {"problem": "?", "answer": "2"},
            {"problem": "!", "answer": "B", "reward": "choices"},
        ),
        "half": write(
            tmp_path / "half.jsonl", {"problem": "\U0001f600", "answer": 1}, {"problem": "\ud83d", "answer": 1}
        ),
        "answers": write(tmp_path / "answers.jsonl", {"id": "a", "ground_truth": "3"}),
        "folder": str(tmp_path / "folder.jsonl"),
    }
    Path(names["folder"]).mkdir()
    before = sorted(tmp_path.iterdir())
    assert main([option.format(**names) for option in options]) == 2
    error = capsys.readouterr().err
    assert message.format(**names) in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_dataset_of_the_hub_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["nobody/nothing-of-this-name", "--check"]) == 2
    error = capsys.readouterr().err
    assert "the hub gives no such dataset" in error and "bring its parquet files" in error and error.count("\n") == 1


GPQA = {"Question": "Which?", "Correct Answer": "this", "Record ID": "rec1", "High-level domain": "Physics"}
GPQA |= {f"Incorrect Answer {number}": f"not {number}" for number in (1, 2, 3)}


def prepared(tmp_path: Path, *options: str) -> list[Problem]:
    main([*options, "--out", str(tmp_path / "out.jsonl"), "--integer-answers", "--keep-duplicates"])
    return load_problems(tmp_path / "out.jsonl", integer_answers=True)


def test_questions_with_choices_get_letters(tmp_path: Path):
    row = {"question": "Which?", "choices": ["a", "b", "c"], "answer": 1, "subject": "law"}
    (problem,) = prepared(tmp_path, write(tmp_path / "mmlu.jsonl", row))
    assert (problem.answer, problem.reward, problem.family) == ("B", "choice", "law")
    assert "(A) a\n(B) b\n(C) c\n" in problem.problem


def test_ifeval_is_judged_by_its_instructions(tmp_path: Path):
    names, asked = ["punctuation:no_comma", "length_constraints:number_words"], [{"num_words": None}, {"num_words": 3}]
    row = {"key": 1000, "prompt": "Say, in three words.", "instruction_id_list": names, "kwargs": asked}
    (problem,) = prepared(tmp_path, write(tmp_path / "ifeval.jsonl", row))
    assert (problem.id, problem.problem, problem.reward) == ("1000", "Say, in three words.", "instructions")
    assert [(one.name, one.kwargs) for one in read_instructions(problem.answer)] == [
        (names[0], {}),
        (names[1], {"num_words": 3}),
    ]


def test_bfcl_has_its_functions_shown_and_its_answers_in_a_file_apart(tmp_path: Path):
    function = {"name": "area", "description": "Of a triangle.", "parameters": {"type": "dict", "properties": {}}}
    question = [[{"role": "user", "content": "How large, with base 10?"}]]
    row = {"id": "simple_0", "question": question, "function": [function]}
    none = {"id": "irrelevance_3", "question": question, "function": [function]}
    source = write(tmp_path / "BFCL_v3_simple.json", row, none)
    truths = [{"id": f"simple_{number}", "ground_truth": [{"area": {"base": [10 + number]}}]} for number in (0, 1)]
    answers = write(tmp_path / "answers.json", *truths)
    first, second = prepared(tmp_path, source, "--answers", answers)
    assert json.dumps(function) in first.problem and first.problem.endswith("The request: How large, with base 10?")
    assert same_calls("[area(base=10)]", read_wanted(first.answer)) and first.family == "simple"
    assert first.reward == second.reward == "calls" and read_wanted(second.answer) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GPQA | {"Correct Answer": ["this"]}, "set.jsonl, row 1, Correct Answer: is not text"),
        (
            {"id": "multi_turn_base_0", "question": [[{"role": "user", "content": "?"}]], "involved_classes": ["X"]},
            "row 1, involved_classes: is of several turns, whose calls are answered by services that BFCL simulates",
        ),
        ({"question": "?", "choices": ["a"], "answer": 0}, "set.jsonl, row 1, choices: is not a list of choices"),
        ({"question": "?", "choices": ["a", "b"], "answer": 2}, "row 1, answer: 2 is not one of the choices"),
        ({"question": "?", "choices": ["a", "b"], "answer": ""}, "row 1, answer: '' is not one of the choices"),
        (
            {"prompt": "?", "instruction_id_list": ["a"], "kwargs": []},
            "row 1, kwargs: does not fit instruction_id_list",
        ),
        ({"prompt": "?", "instruction_id_list": ["a"], "kwargs": ["x"]}, "row 1, kwargs: does not fit"),
        (
            {"id": "simple_1", "question": "?", "function": []},
            "row 1, id: 'simple_1' has no ground_truth. Hint: name the file",
        ),
        ({"id": "s", "question": "?", "function": [], "ground_truth": ["f()"]}, "ground_truth: is not a list of calls"),
        ({"id": "s", "question": "?", "function": [], "ground_truth": 3}, "ground_truth: is not a list of calls"),
        (
            {"id": "s", "question": [[{"content": "a"}], [{"content": "b"}]], "function": [], "ground_truth": []},
            "question: is not a single turn",
        ),
    ],
)
def test_a_row_of_a_published_set_that_is_not_as_published_is_named(
    tmp_path: Path, row: dict, message: str, capsys: pytest.CaptureFixture[str]
):
    source = write(tmp_path / "set.jsonl", row)
    assert main([source, "--out", str(tmp_path / "out.jsonl")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out.jsonl").exists()
