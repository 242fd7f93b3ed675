import json
from pathlib import Path

import pytest

from recipes.prepare import main
from rstar_ray.data.problems import load_problems
from rstar_ray.run_dir.durable import read_json


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_prepared_can_be_trained_on_and_its_counts_add_up(tmp_path: Path, suffix: str, capsys):
    exam = write(tmp_path / "exam.jsonl", {"question": "one two three four five six seven eight nine", "answer": "1"})
    source = write(
        tmp_path / "raw.jsonl",
        {"question": "What is 1 + 1?", "final_answer": 2},
        {"question": "What is 1 + 1 ?", "final_answer": 2},
        {"question": "Half of one?", "final_answer": "1/2"},
        {"question": "zero one two three four five six seven eight", "final_answer": "3"},
    )
    out = tmp_path / f"out.{suffix}"
    main([source, "--out", str(out), "--integer-answers", "--against", exam])
    (problem,) = load_problems(out, integer_answers=True)
    assert (problem.id, problem.problem, problem.answer) == ("raw-1", "What is 1 + 1?", "2")
    counts = read_json(tmp_path / f"out.{suffix}.counts.json")
    assert counts["read"] == 4 == counts["kept"] + sum(counts["dropped"].values())
    assert counts["settings"]["integer_answers"] is True
    shown = capsys.readouterr().out
    assert "reading question, final_answer" in shown and "exact duplicate" in shown and "with exam" in shown


def test_check_reports_and_writes_nothing(tmp_path: Path, capsys):
    source = write(tmp_path / "raw.jsonl", {"problem": "What is 1 + 1?", "answer": "2"})
    main([source, "--check"])
    assert "1  kept" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["raw.jsonl"]


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
        (["nothing-here", "--check"], "nothing-here: there is no such file; name an existing file or folder"),
        (["{good}"], "--out: nowhere to write; name a .jsonl or .parquet file, or give --check"),
        (["{good}", "--out", "x.txt"], "--out: x.txt is neither"),
        (["{good}", "--out", "no/such/folder/x.jsonl"], "does not exist; make the folder first"),
        (["{good}", "--check", "--integer-answers", "--max-chars", "3"], "sources: no problem is left"),
        (["{good}", "--check", "--columns.answer", "truth"], "--columns.answer: good.jsonl, row 1 has no 'truth'"),
        (["{good}", "--check", "--solved-at-most", "1"], "--solved-at-most: 1 leaves nothing to keep"),
        (["{list}", "--check"], "list.jsonl, row 2, answer: is a list, not text"),
        (["{empty}", "--check"], "empty.jsonl: holds no row"),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, options: list[str], message: str, capsys
):
    names = {
        "good": write(tmp_path / "good.jsonl", {"problem": "What is 1 + 1?", "answer": "2"}),
        "list": write(tmp_path / "list.jsonl", {"problem": "?", "answer": "2"}, {"problem": "!", "answer": [1]}),
        "empty": write(tmp_path / "empty.jsonl"),
    }
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as refused:
        main([option.format(**names) for option in options])
    error = capsys.readouterr().err
    assert refused.value.code == 2 and message in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_dataset_of_the_hub_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit):
        main(["nobody/nothing-of-this-name", "--check"])
    error = capsys.readouterr().err
    assert "the hub gives no such dataset" in error and "bring its parquet files" in error and error.count("\n") == 1
