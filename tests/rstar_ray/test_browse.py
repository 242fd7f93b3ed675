"""What the page's trajectory browser is given: rows, reasons, and as many texts as fit."""

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rstar_ray.algorithm.update import SeenTokens
from rstar_ray.outcome import Outcome
from rstar_ray.report.run_record import TrajectoryFile, read_ledger, read_run
from rstar_ray.report.trajectory_browser import ids_of, ledger_data, ledger_ids, read_browser, rule_of
from rstar_ray.report.trajectory_rows import (
    NOTHING_KNOWN,
    Siblings,
    StepStatuses,
    reason,
    siblings_of,
    statuses_by_step,
)
from rstar_ray.report.trajectory_text import (
    DECADES,
    FIRST,
    LEAST_DECADE,
    MOST,
    NEGATIVE,
    SCALE,
    Body,
    chosen,
    figures_of,
    texts_of,
)
from rstar_ray.run_dir.ledger import RolloutStatus, append_ledger
from rstar_ray.run_dir.trajectory_log import readable, token_chars, write_trajectories
from rstar_ray.trajectory import Problem
from tests.rstar_ray.fabricate import decode, example_trajectories, run_directory, trajectory

pytestmark = pytest.mark.usefixtures("without_fsync")
Row = dict[str, Any]


def row(sibling: int, *, reward: float = 1.0, calls: int = 1, failed: int = 0, answers: int = 1) -> Row:
    return {
        "stage": "stage1", "step": 10, "group_id": "stage1/10/0-p", "rollout_id": f"stage1/10/0-p/{sibling}",
        "reward": reward, "num_calls": calls, "num_failed": failed, "num_answers": answers, "turns": [{}, {}],
    }  # fmt: skip


def step_statuses(**statuses: str) -> StepStatuses:
    return StepStatuses({name.replace("s", "0-p/"): status for name, status in statuses.items()}, {}, {})


def test_a_rollout_shows_why_it_was_kept_or_not():
    group = [row(0), row(1, calls=4, failed=1), row(2, reward=0), row(3, reward=0, calls=0)]
    known = step_statuses(s0="trained", s1="resampled_away", s2="trained", s3="resampled_away")
    assert [reason(one, group, known, "paper") for one in group] == [
        "Trained on: among 1 of the group's 2 right answers that were kept. Right answers: drawn by 1 / p_total, "
        "flawless ones first; here p_total = p_err 0.00 (0 of 1 calls failed) + p_format 0.00 = 0.00.",
        "Resampled away: not among 1 of the group's 2 right answers that were kept. Right answers: drawn by 1 / "
        "p_total, flawless ones first; here p_total = p_err 0.25 (1 of 4 calls failed) + p_format 0.00 = 0.25.",
        "Trained on: among 1 of the group's 2 wrong answers that were kept. Wrong answers are drawn uniformly.",
        "Resampled away: not among 1 of the group's 2 wrong answers that were kept. Wrong answers are drawn uniformly.",
    ]
    assert reason(group[2], group, known, "release").endswith("Of the wrong answers the released rule keeps the first.")
    assert "the lowest p_total first" in reason(group[1], group, known, "release")
    assert reason(group[1], group, known, "random").endswith("All are drawn uniformly.")
    assert reason(group[2], group, known, "mine:best") == (
        "Trained on: among 1 of the group's 2 wrong answers that were kept, by mine:best."
    )
    assert reason(group[0], group, known, "none") == (
        "Trained on: among 1 of the group's 2 right answers that were kept."
    )


def test_a_penalty_that_is_switched_off_is_not_part_of_the_reason(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 1})
    config = json.loads((path / "config.json").read_text())
    assert rule_of(read_run(path), "stage1") == "paper"
    config["stage1"]["algorithm"]["roc_answer_format"] = False
    (path / "config.json").write_text(json.dumps(config))
    rule = rule_of(read_run(path), "stage1")
    known = step_statuses(s0="trained", s1="resampled_away")
    assert reason(row(0), [row(0), row(1, reward=0)], known, rule) == (
        "Trained on: among 1 of the group's 1 right answers that were kept, by paper without p_format."
    )


def test_with_graded_rewards_a_rollout_is_compared_with_those_of_its_reward():
    group = [row(0, reward=0.5), row(1), row(2, reward=0)]
    known = step_statuses(s0="trained", s1="resampled_away", s2="trained")
    assert "among those with reward 0.5" in reason(group[0], group, known, "paper")
    assert "among those with" not in reason(group[1], group[1:], known, "paper")


def test_equal_rewards_failures_of_ours_and_evaluations_have_separate_reasons():
    group = [row(0), row(1)]
    equal = step_statuses(s0="in_equal_groups", s1="in_equal_groups")
    assert reason(group[0], group, equal, "paper").endswith("have the same reward: no signal.")
    lost = StepStatuses({"0-p/0": "left_out", "0-p/1": "dropped"}, {}, {"0-p/0": "too long", "0-p/1": "no sandbox"})
    assert [reason(one, group, lost, "paper") for one in group] == [
        "Left out by the learner: too long.",
        "Dropped: no sandbox.",
    ]
    assert reason(group[0], group, NOTHING_KNOWN, "paper") == ""


def test_the_characters_of_tokens_make_up_the_text():
    pieces = {1: "a", 2: "b c", 3: "\ufffd", 4: "\ufffd"}

    def whole(ids: Any) -> str:
        return "é" if list(ids) == [3, 4] else "".join(pieces[one] for one in ids)

    assert token_chars([1, 3, 4, 2], "aéb c", pieces.__getitem__, whole) == [1, 0, 1, 3]
    assert token_chars([1, 2], "a b c", pieces.__getitem__, whole) is None  # the pieces are not the text


def test_what_the_learner_saw_can_be_read_back():
    one = example_trajectories(1.0)[2]
    diffs = np.resize(np.array([0, 3e-7, -3e-7, 0.02, -50, np.nan], np.float32), int(one.loss_mask.sum()))
    seen = SeenTokens(entropies=np.abs(diffs), logprob_diffs=diffs)
    ((_, _, entropies, differences),) = figures_of(Siblings(0, "g", [readable(one, decode, seen)], [0]))[0]
    numbers = [ord(letter) - FIRST for letter in differences[:6]]
    assert numbers[0] == 0 and numbers[5] == MOST
    for number, diff in zip(numbers[1:5], diffs[1:5].tolist(), strict=True):
        size = 10 ** (number % NEGATIVE / DECADES - LEAST_DECADE)
        assert size == pytest.approx(abs(diff), rel=0.08) and (number > NEGATIVE) == (diff < 0)
    assert ((ord(entropies[3]) - FIRST) / SCALE) ** 2 == pytest.approx(0.02, rel=0.02)


def test_a_call_after_which_the_rollout_ended_is_shown_without_a_result():
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
    one = trajectory(Problem(id="p", problem="?", answer="1"), [(call, "1", Outcome.OK), (call, "", None)], reward=0.0)
    named = readable(one, decode) | {"stage": "stage1", "step": 10}
    (shown,) = texts_of(Siblings(0, "g", [named], [0]), NOTHING_KNOWN, "paper")
    assert [[outcome for _, outcome in turn["results"]] for turn in shown["turns"]] == [["ok"], ["no result"]]


def test_a_page_takes_whole_groups_in_rounds_over_the_files_until_it_is_full():
    bodies = [Body(g, file, f"{file}", place, b"x" * 300, b"y" * 60) for g, (file, place) in enumerate(
        [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)])]  # fmt: skip
    held, figures = chosen(bodies, most_text_bytes=5 * 464, most_bytes=5 * 464 + 2 * 144)
    assert [(body.file, body.place) for body in held] == [(2, 0), (1, 0), (0, 0), (2, 1), (0, 1)]
    assert figures == {4, 3}
    everything, all_figures = chosen(bodies)
    assert len(everything) == 6 and len(all_figures) == 6


def written(folder: Path, groups: int, siblings: int) -> TrajectoryFile:
    problem = Problem(id="p", problem="?", answer="1")
    one = trajectory(problem, [("<answer>1</answer>", "", None)], reward=1.0)
    many = [
        replace(one, summary=replace(one.summary, rollout_id=f"g{group}/{sibling}", group_id=f"g{group}"))
        for group in range(groups)
        for sibling in range(siblings)
    ]
    path = folder / "stage1-step-000010.jsonl"
    write_trajectories(path, many, decode, stage="stage1", step=10)
    return TrajectoryFile(path, "stage1", 10, "", 10)


def test_a_half_written_file_of_trajectories_is_read_as_far_as_it_goes(tmp_path: Path):
    file = written(tmp_path, groups=2, siblings=2)
    whole = file.path.read_bytes()
    second = whole.index(b"\n") + 1
    file.path.write_bytes(whole[:second] + b'{"torn": \n' + whole[second:-20])
    rows = [one["rollout_id"] for group in siblings_of(file, 0, most_rows=99, most_bytes=10**9) for one in group.rows]
    assert rows == ["g0/0", "g0/1", "g1/0"]


def test_problems_of_two_files_may_have_the_same_id(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 3})
    for file in (path / "trajectories").iterdir():
        file.unlink()
    trained, exam = Problem(id="1", problem="2+2?", answer="4"), Problem(id="1", problem="7*7?", answer="49")
    for name, problem, step in (("step-000001", trained, 1), ("held-out", exam, 3)):
        one = trajectory(problem, [("<answer>4</answer>", "", None)], reward=1.0)
        file = path / "trajectories" / f"stage1-{name}.jsonl"
        write_trajectories(file, [one], decode, stage="stage1", step=step)
    shown = read_browser(read_run(path), [])[0].as_json()
    asked = {shown["files"][file]["name"]: shown["problems"][problem][1] for _, file, problem, _ in shown["groups"]}
    assert asked == {"stage1-step-000001.jsonl": "2+2?", "stage1-held-out.jsonl": "7*7?"}


def test_a_rollout_beside_a_dropped_one_keeps_its_number(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 1})
    for file in (path / "trajectories").iterdir():
        file.unlink()
    problem = Problem(id="1", problem="2+2?", answer="4")
    one = trajectory(problem, [("<answer>4</answer>", "", None)], reward=1.0)
    group = [
        replace(one, summary=replace(one.summary, rollout_id=f"stage1/1/1/{n}", group_id="stage1/1/1"))
        for n in (0, 2, 3)
    ]
    write_trajectories(path / "trajectories" / "stage1-step-000001.jsonl", group, decode, stage="stage1", step=1)
    columns = read_browser(read_run(path), [])[0].as_json()["columns"]
    assert columns["sibling"] == [0, 2, 3]


def test_every_count_of_the_ledger_leads_to_its_rollouts(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 2})
    for step in (1, 2):
        statuses = {
            f"stage1/{step}/0-p/{n}": status for n, status in enumerate((*RolloutStatus, RolloutStatus.TRAINED))
        }
        reasons = {f"stage1/{step}/0-p/3": "too long", f"stage1/{step}/0-p/4": "no sandbox"}
        append_ledger(path, statuses, stage="stage1", step=step, reasons=reasons, advantages={})
    ledger = read_ledger(read_run(path))
    data = ledger_data(read_run(path), ledger)
    assert data["steps"][1] == ["stage1", 2, 2, 7, 2, 1, 1, 1, 1, 1]
    assert data["lost"][0] == ["stage1", 2, "0-p/4", "dropped", "no sandbox"] and data["num_lost"] == 4
    packed = ledger_ids(ledger)
    assert list(packed) == ["stage1/2", "stage1/1"]
    assert json.loads(zlib.decompress(packed["stage1/1"])) == ids_of(ledger[0]) == {
        "0-p": {"0": 0, "6": 0, "1": 1, "2": 2, "3": 3, "4": 4, "5": 5}
    }  # fmt: skip
    assert statuses_by_step(ledger)["stage1", 1].statuses["0-p/1"] == RolloutStatus.RESAMPLED_AWAY
