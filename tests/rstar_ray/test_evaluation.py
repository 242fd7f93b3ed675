import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import combinations
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar_ray.data.order import digest_of_problems
from rstar_ray.data.problems import load_problems
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.evaluator import forget_evaluations
from rstar_ray.evaluation.figures import bootstrap_interval, evaluate, majority_is_right, pass_at_k
from rstar_ray.evaluation.results import ResultLog
from rstar_ray.outcome import Outcome
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.trajectory import Problem, StopReason, TrajectorySummary
from tests.rstar_ray.fabricate import results_of, summary, write_rows

GOOD = {"id": "a", "problem": "1 + 1 = ?", "answer": "2"}


def problem(name: str, family: str = "", difficulty: float = 0.0) -> Problem:
    return Problem(id=name, problem="?", answer="1", family=family, difficulty=difficulty)


def rollouts(name: str, rewards: Sequence[float]) -> list[TrajectorySummary]:
    return [summary(name, sibling, reward=reward) for sibling, reward in enumerate(rewards)]


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one(num_rollouts: int, data: st.DataObject):
    num_correct = data.draw(st.integers(0, num_rollouts))
    k = data.draw(st.integers(1, num_rollouts))
    draws = list(combinations([1] * num_correct + [0] * (num_rollouts - num_correct), k))
    assert pass_at_k(num_rollouts, num_correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_set_whose_rule_is_also_taken_loosely_has_both_scores(tmp_path: Path):
    problems = [replace(problem(name), reward="instructions") for name in ("a", "b")]
    ends = [replace(one, loose=loose) for one, loose in zip(rollouts("a", [1, 0]), (1.0, 1.0), strict=True)]
    cut = rollouts("b", [0, 0])  # never judged
    result = evaluate(results_of(problems, [*ends, *cut]), stage="stage1", step=1)
    assert (result["avg_at_k"], result["loose_avg_at_k"]) == (1 / 4, 2 / 4)
    assert result.as_row()["intervals"]["loose_avg_at_k"][1] >= 0.5
    with ResultLog(tmp_path / "rows.jsonl", problems) as log:
        written = [log.add(ends), log.add(cut)]
    assert ResultLog(tmp_path / "rows.jsonl", problems).results == written
    plain = evaluate(results_of([problem("a")], rollouts("a", [1, 0])), stage="stage1", step=1)
    assert plain["loose_avg_at_k"] is None and "loose_avg_at_k" not in plain.intervals


def test_results_after_a_step_are_removed_and_files_of_the_user_stay(tmp_path: Path):
    names = [
        "stage1-step-000010-held-out-ab.jsonl",
        "stage1-step-hard-ab.jsonl",
        "stage1-step-000020-held-out-ab.jsonl",
    ]
    (tmp_path / "evaluations").mkdir()
    for name in names:
        (tmp_path / "evaluations" / name).touch()
    forget_evaluations(RunDir(tmp_path), "stage1", after_step=10)
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir()) == sorted(names[:2])


def test_avg_at_k_and_pass_at_k_by_hand():
    problems = [problem("a"), problem("b")]
    result = evaluate(
        results_of(problems, rollouts("a", [1, 0, 0, 0]) + rollouts("b", [0] * 4)), stage="stage1", step=40
    )
    assert (result.k, result.num_problems, result["avg_at_k"], result["pass_at_k"]) == (4, 2, 1 / 8, 0.5)
    assert result.pass_at == pytest.approx({1: 1 / 8, 2: 1 / 4, 4: 1 / 2})
    assert result.intervals["avg_at_k"] == (0, 0.25)


def test_figures_are_broken_down_by_family_and_difficulty():
    problems = [problem("a", "gcd", 1), problem("b", "gcd", 3), problem("c", "sum", 3)]
    done = rollouts("a", [1, 1]) + rollouts("b", [1, 0]) + rollouts("c", [0, 0])
    done[-1] = replace(done[-1], stop_reason=StopReason.TRUNCATED)
    done[-3:-1] = [replace(one, stop_reason=StopReason.MAX_TURNS) for one in done[-3:-1]]
    result = evaluate(results_of(problems, done), stage="stage1", step=1)
    assert {name: (score["num_problems"], score["avg_at_k"]) for name, score in result.by_family.items()} == {
        "gcd": (2, 0.75),
        "sum": (1, 0.0),
    }
    assert {name: score["avg_at_k"] for name, score in result.by_difficulty.items()} == {"1": 1.0, "3": 0.25}
    assert result["frac_truncated"] == pytest.approx(1 / 6)
    assert result["frac_max_turns"] == pytest.approx(2 / 6)


def test_right_answers_are_counted_by_what_became_of_the_first_call():
    done = rollouts("a", [1, 0, 1, 0]) + rollouts("b", [1, 1, 0, 0])
    outcomes = [(Outcome.ERROR, Outcome.OK)] * 3 + [(Outcome.OK, Outcome.TIMEOUT)] * 4 + [()]
    done = [replace(one, outcomes=of) for one, of in zip(done, outcomes, strict=True)]
    result = evaluate(results_of([problem("a"), problem("b")], done), stage="sft", step=1)
    assert result["right_after_failed_call"] == pytest.approx(2 / 3)
    assert result["right_without_failed_call"] == pytest.approx(2 / 5)
    none_failed = evaluate(results_of([problem("b")], done[4:]), stage="sft", step=1)
    assert none_failed["right_after_failed_call"] is None and none_failed["right_without_failed_call"] == 0.5


def test_a_missing_rollout_is_not_averaged_over():
    with pytest.raises(ValueError, match="problem b has 1 rollouts where others have 2"):
        done = rollouts("a", [1, 1]) + rollouts("b", [1])
        evaluate(results_of([problem("a"), problem("b")], done), stage="sft", step=1)
    with pytest.raises(ValueError, match="no problem"):
        evaluate([], stage="sft", step=1)


def test_the_bootstrap_interval_is_that_of_the_mean_and_the_same_every_time():
    rates = [0.0] * 60 + [1.0] * 40
    low, high = bootstrap_interval([(rate, 1) for rate in rates])
    assert (low, high) == bootstrap_interval([(rate, 1) for rate in rates])
    assert (low, high) == (pytest.approx(0.4 - 0.096, abs=0.015), pytest.approx(0.4 + 0.096, abs=0.015))
    assert bootstrap_interval([(1, 1), (1, 1)]) == (1.0, 1.0)


def test_a_majority_counts_right_answers_as_one_and_draws_ties_at_random():
    assert majority_is_right([True, True, False, False], ["1/2", "0.5", "3", "4"]) == 1.0
    assert majority_is_right([True, False, False], ["1", "7", "7 "]) == 0.0
    assert majority_is_right([True, False, False], ["1", "7", "8"]) == pytest.approx(1 / 3)
    assert majority_is_right([True, False, False, False], ["1", "", "", ""]) == 1.0  # no answer, no vote
    assert majority_is_right([False, False], ["", ""]) == 0.0


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["", "1", "2", "3"])), min_size=1, max_size=7))
def test_a_majority_is_what_drawing_at_random_gives(rollouts_k: list[tuple[bool, str]]):
    votes = ["right" if right else answer for right, answer in rollouts_k if right or answer]
    most = max((votes.count(vote) for vote in votes), default=0)
    drawn = sorted({vote for vote in votes if votes.count(vote) == most})
    expected = drawn.count("right") / len(drawn) if drawn else 0.0
    correct, answers = zip(*rollouts_k, strict=True)
    assert majority_is_right(correct, answers) == pytest.approx(expected)


def test_every_figure_has_its_interval_over_problems():
    problems = [problem(str(number)) for number in range(40)]
    done: list[TrajectorySummary] = []
    for number in range(40):
        right, calls = float(number % 2), 1 + number % 3
        done += [
            summary(
                str(number), sibling, reward=right, calls=calls, failed=number % 2, response=100 + number, answer="7"
            )
            for sibling in range(2)
        ]
    result = evaluate(results_of(problems, done), stage="stage1", step=1)
    assert (result["maj_at_k"], result["calls_mean"]) == (0.5, pytest.approx(sum(1 + n % 3 for n in range(40)) / 40))
    assert result["tool_error_rate"] == pytest.approx(20 / sum(1 + n % 3 for n in range(40)))
    for name in ("avg_at_k", "pass_at_k", "maj_at_k", "calls_mean", "response_tokens_mean", "tool_error_rate"):
        low, high = result.intervals[name]
        value = result[name]
        assert value is not None and low < value < high, name
    assert result.intervals["frac_truncated"] == (0.0, 0.0)


def test_results_on_disk_are_those_of_problems_that_still_read_the_same(tmp_path: Path):
    problems = [problem("a"), problem("b"), problem("c")]
    with ResultLog(tmp_path / "rows" / "set.jsonl", problems) as log:
        log.add(rollouts("b", [1, 0]))
        kept = log.add(rollouts("a", [1, 1]))
        assert [left.id for left in log.missing] == ["c"]
    rows = [json.loads(line) for line in (tmp_path / "rows" / "set.jsonl").read_text().splitlines()]
    assert [(row["id"], row["num_correct"], row["k"]) for row in rows] == [("b", 1, 2), ("a", 2, 2)]
    with (tmp_path / "rows" / "set.jsonl").open("a") as file:
        file.write('{"id": "c", "num_cor')  # torn by a crash
    again = ResultLog(
        tmp_path / "rows" / "set.jsonl", [replace(problems[1], problem="other"), problems[2], problems[0]]
    )
    assert again.results == [kept] and [left.id for left in again.missing] == ["b", "c"]
    with again:
        again.add(rollouts("c", [0, 0]))
    assert [result.problem_id for result in ResultLog(again.path, problems).results] == ["a", "b", "c"]


def test_problems_are_read_from_jsonl_and_parquet_alike(tmp_path: Path):
    rows = [
        GOOD | {"family": None, "difficulty": None},
        GOOD | {"id": "b", "answer": "-17", "family": "sum", "difficulty": 4.5},
    ]
    jsonl = write_rows(tmp_path / "set.jsonl", *rows)
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "set.parquet")
    problems = load_problems(jsonl, integer_answers=True)
    assert problems == load_problems(tmp_path / "set.parquet", integer_answers=True)
    assert problems[1].as_row() == rows[1] | {"reward": ""} and problems[0].family == ""


def test_a_problem_may_carry_metadata_and_the_reward_function_that_judges_it(tmp_path: Path):
    metadata = {"points": 3, "hints": ["a", {"b": None}]}
    rows = [GOOD, GOOD | {"id": "b", "answer": "a text", "reward": "mine:close", "metadata": metadata}]
    problems = load_problems(write_rows(tmp_path / "set.jsonl", *rows), integer_answers=True)
    assert (problems[1].metadata, problems[1].reward) == (metadata, "mine:close")
    assert (problems[0].metadata, {**problems[0].as_row()}) == (
        {},
        GOOD | {"family": "", "difficulty": 0.0, "reward": ""},
    )
    as_text = [rows[0] | {"reward": None, "metadata": None}, rows[1] | {"metadata": json.dumps(metadata)}]
    parquet.write_table(arrow.Table.from_pylist(as_text), tmp_path / "set.parquet")
    assert load_problems(tmp_path / "set.parquet", integer_answers=True) == problems
    other = replace(problems[1], metadata={"points": 4})
    assert len({digest_of_problems([one]) for one in (problems[1], other, replace(other, metadata={}))}) == 3
    assert len({problems[1], other}) == 2  # still usable as keys


def test_other_columns_become_metadata_and_a_row_may_name_its_environment(tmp_path: Path):
    row = GOOD | {"size": 4, "empty": None, "when": "today", "metadata": {"size": 5, "more": [1]}}
    game = {"id": "b", "problem": "Play.", "environment": "mine:Game", "board": [[0, 1]]}
    problems = load_problems(write_rows(tmp_path / "set.jsonl", row, game), integer_answers=True)
    assert problems[0].metadata == {"size": 5, "when": "today", "more": [1]}
    assert (problems[1].environment, problems[1].answer, problems[1].metadata) == ("mine:Game", "", {"board": [[0, 1]]})
    assert load_problems(write_rows(tmp_path / "again.jsonl", problems[1].as_row()), integer_answers=True) == [
        problems[1]
    ]
    dated = [{"id": "a", "problem": "?", "answer": "1", "when": datetime(2026, 1, 1), "size": 4}]
    parquet.write_table(arrow.Table.from_pylist(dated), tmp_path / "set.parquet")
    assert load_problems(tmp_path / "set.parquet", integer_answers=True)[0].metadata == {"size": 4}


def test_a_difficulty_may_be_text_as_in_csv(tmp_path: Path):
    (tmp_path / "set.csv").write_text("id,problem,answer,difficulty\na,?,1,2\nb,?,1,\n")
    assert [one.difficulty for one in load_problems(tmp_path / "set.csv", integer_answers=True)] == [2.0, 0.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"id": "b", "environment": "mine.Game"}, "row 2: environment 'mine.Game' is not module:object"),
        (GOOD | {"id": "b", "text": "x" * 70_000}, r"row 2: its other columns hold 70,006 characters.* \(text\)"),
        (GOOD | {"id": "b", "text": "题" * 70_000}, r"row 2: its other columns hold 70,006 characters"),
        (GOOD | {"id": "b", "reward": 0.5}, "row 2: reward 0.5 is unknown"),
        (GOOD | {"id": "b", "reward": ["exact"]}, r"row 2: reward \['exact'\] is unknown"),
        (GOOD | {"id": "b", "metadata": [1]}, "row 2: metadata is list, not an object"),
        (GOOD | {"id": "b", "metadata": "words"}, "row 2: metadata is not JSON"),
        (GOOD | {"id": "b", "reward": "mine.close"}, "row 2: reward 'mine.close' is unknown"),
        ({"id": "b", "problem": "?"}, "row 2: has no answer"),
        ({"id": "b", "answer": "1"}, "row 2: has no problem"),
        ({"question_text": "?", "gold": "1"}, r"row 2: has no id \(columns: question_text, gold\)"),
        (GOOD | {"id": "b", "answer": None}, "row 2: has no answer"),
        (GOOD | {"id": "b", "answer": "  "}, "row 2: answer is empty"),
        (GOOD | {"id": "b", "problem": ""}, "row 2: problem is empty"),
        (GOOD | {"id": "b", "answer": [7]}, r"row 2: answer \[7\] is not a string"),
        (GOOD | {"id": "b", "answer": 0.5}, r"row 2: answer 0.5 is not a string"),
        (GOOD | {"id": "b", "answer": r"\frac12"}, "row 2: answer .* is not an integer"),
        (GOOD | {"id": "b", "answer": "2.5"}, "row 2: answer '2.5' is not an integer"),
        (GOOD | {"id": "b", "difficulty": "hard"}, "row 2: difficulty 'hard' is not a number"),
        (GOOD | {"id": "b", "difficulty": 10**400}, "row 2: difficulty 10+ is not a number"),
        (GOOD, "row 2: id 'a' is also that of row 1"),
        ([1, 2], "row 2: is not an object"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_number(tmp_path: Path, row: object, message: str):
    path = write_rows(tmp_path / "set.jsonl", GOOD, row)
    with pytest.raises(ConfigError, match=f"set.jsonl, {message}"):
        load_problems(path, integer_answers=True)


def test_files_that_hold_no_problems_are_refused(tmp_path: Path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(GOOD) + '\n{"id": "b", "prob')
    with pytest.raises(ConfigError, match=r"broken.jsonl, row 2: is not JSON"):
        load_problems(broken, integer_answers=True)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty.jsonl: holds no problem"):
        load_problems(tmp_path / "empty.jsonl", integer_answers=True)
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"bad.parquet: is not parquet"):
        load_problems(tmp_path / "bad.parquet", integer_answers=True)
    with pytest.raises(ConfigError, match="no such file"):
        load_problems(tmp_path / "absent.jsonl", integer_answers=True)
    (tmp_path / "set.xls").write_text("id,problem,answer\n")
    with pytest.raises(ConfigError, match="not a known format"):
        load_problems(tmp_path / "set.xls", integer_answers=True)
