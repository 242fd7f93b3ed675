"""What a run leaves on disk, at its edges: rows, checkpoints, refusals, figures."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.run_dir import folder
from rstar_ray.run_dir.durable import append_row, cut_rows, mend_rows, read_json, read_rows, to_row, write_json
from rstar_ray.run_dir.folder import RunDir, checkpoint_name, differing_fields, flatten
from rstar_ray.run_dir.metrics import (
    MetricsLog,
    PlacementFigures,
    SftMetrics,
    StepMetrics,
    StepTimings,
    is_correct,
    progress_line,
    share_rollout_time,
    step_metrics,
    tool_error_share_correct,
)
from rstar_ray.run_dir.trajectory_log import readable, split_turns, write_trajectories
from rstar_ray.trajectory import TrajectorySummary
from tests.rstar_ray.fabricate import UPDATE, decode, example_trajectories, summary

# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_row_keeps_its_letters_and_has_no_number_that_json_lacks(tmp_path: Path):
    row = {"text": "é→😀", "values": (1.5, math.nan, [math.inf, {"deep": -math.inf}]), 3: True, "n": None}
    assert to_row(row) == '{"text": "é→😀", "values": [1.5, null, [null, {"deep": null}]], "3": true, "n": null}\n'
    write_json(tmp_path / "a.json", {"text": "é", "nan": math.nan})
    assert (tmp_path / "a.json").read_text("utf-8") == '{\n  "text": "é",\n  "nan": null\n}\n'


def test_a_file_that_is_no_json_is_named(tmp_path: Path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json: not JSON"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_text("{}\n{}\n{\n{}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: not JSON"):
        read_rows(tmp_path / "a.jsonl")


def test_only_a_torn_line_is_cut_off(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    mend_rows(path)
    assert not path.exists() and read_rows(path) == []
    for before, after in (("", ""), ('{"a": 1}\n', '{"a": 1}\n'), ('{"a": 1}\n{"b', '{"a": 1}\n'), ('{"b', "")):
        path.write_text(before)
        mend_rows(path)
        assert path.read_text() == after


def test_cutting_tells_how_many_went_and_leaves_a_file_alone_where_none_did(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    for step in range(1, 6):
        append_row(path, {"stage": "a", "step": step})
    append_row(path, {"no": "stage"})
    before = path.stat().st_ino
    assert cut_rows(path, stage="a", after_step=5) == 0 and path.stat().st_ino == before
    assert cut_rows(path, stage="a", after_step=2) == 3
    assert read_rows(path) == [{"stage": "a", "step": 1}, {"stage": "a", "step": 2}, {"no": "stage"}]


# -- the folder --------------------------------------------------------------------------------------------------------


def opened(path: Path, config: dict[str, Any], stage: str = "stage1", **more: Any) -> RunDir:
    with RunDir.open(path, stage, config, **more) as run_dir:
        return run_dir


def test_settings_are_compared_leaf_by_leaf():
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": {}, "f": None}) == {"a.b": 1, "a.c.d": 2, "e": {}, "f": None}
    found = differing_fields({"a": {"b": 1, "c": 2}, "gone": 3}, {"a": {"b": 1, "c": 4}, "new": 5})
    assert found == [("a.c", 2, 4), ("gone", 3, ...), ("new", ..., 5)]


def test_a_refusal_names_five_fields_and_counts_the_others(tmp_path: Path):
    config = {f"f{n}": n for n in range(7)}
    opened(tmp_path, config)
    with pytest.raises(ConfigError) as refused:
        opened(tmp_path, {name: value + 1 for name, value in config.items()})
    said = str(refused.value)
    assert "f0: 0 there, 1 now; " in said and "f4: 4 there, 5 now; and 2 more)" in said and "f5" not in said
    with pytest.raises(ConfigError) as refused:
        opened(tmp_path, {**config, "f0": 9, "f1": 9, "f2": 9, "f3": 9, "f4": 9})
    assert "more)" not in str(refused.value)


def test_settings_of_another_time_are_named(tmp_path: Path):
    opened(tmp_path, {f"old{n}": 1 for n in range(8)} | {"kept": 1})
    with pytest.raises(ConfigError) as refused:
        opened(tmp_path, {"kept": 1, "new": 2})
    said = str(refused.value)
    assert "gone since: old0, old1, old2, old3, old4, old5 and 2 more; new since: new" in said


def test_a_branch_that_may_differ_is_a_whole_name(tmp_path: Path):
    config = {"checkpoint": {"keep": 1, "every": 2}, "checkpoints": 3, "scale": "tiny", "seed": 0}
    opened(tmp_path, config, may_differ=("checkpoint",))
    opened(tmp_path, config | {"checkpoint": {"keep": 5, "every": 2}}, may_differ=("checkpoint",))
    opened(tmp_path, config | {"checkpoint": {"keep": 5, "every": 2}}, may_differ=("checkpoint.keep",))
    with pytest.raises(ConfigError, match="checkpoints: 3 there, 4 now"):
        opened(tmp_path, config | {"checkpoints": 4}, may_differ=("checkpoint",))
    opened(tmp_path, config | {"checkpoints": 4}, "stage2")  # a stage of its own ...
    with pytest.raises(ConfigError, match="stage1 seed: 0 there, 1 now"):
        opened(tmp_path, config | {"seed": 1}, "stage3")  # ... but of one run


def test_what_an_evaluation_leaves_is_no_foreign_folder(tmp_path: Path):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "evaluations.jsonl").touch()
    (tmp_path / ".hidden").touch()
    opened(tmp_path, {"a": 1})
    other = tmp_path / "other"
    other.mkdir()
    for name in "dcba":
        (other / name).touch()
    with pytest.raises(ConfigError, match=r"holds other files \(a, b, c\) and no run"):
        opened(other, {"a": 1})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        opened(tmp_path / "file", {"a": 1})


def write(run_dir: RunDir, step: int, *, stage: str = "stage1", keep_last: int = 2, text: str = "x") -> None:
    with run_dir.write_checkpoint(stage, step) as unfinished:
        (unfinished / "deep").mkdir()
        (unfinished / "deep" / "weights").write_text(text)
    run_dir.prune(stage, keep_last)


def steps(run_dir: RunDir, stage: str = "stage1") -> list[int]:
    return [checkpoint.step for checkpoint in run_dir.checkpoints(stage)]


def test_the_last_checkpoints_stay_and_at_least_one(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    assert steps(run_dir) == [] and run_dir.newest_checkpoint("stage1") is None
    for step in (1, 2, 10, 3):
        write(run_dir, step)
    assert steps(run_dir) == [3, 10]
    run_dir.finish_stage("stage1", 3)
    for step in (11, 12):
        write(run_dir, step, keep_last=0)
    assert steps(run_dir) == [3, 12]
    write(run_dir, 13, keep_last=3)
    assert steps(run_dir) == [3, 12, 13]
    assert sorted(path.name for path in run_dir.checkpoints_path.iterdir()) == [
        "stage1-step-000003", "stage1-step-000012", "stage1-step-000013"]  # fmt: skip


def test_a_checkpoint_is_written_again_in_place_and_lists_its_files(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    write(run_dir, 1)
    write(run_dir, 1, text="more")
    newest = run_dir.newest_checkpoint("stage1")
    assert newest is not None
    sha256 = "187897ce0afcf20b50ba2b37dca84a951b7046f29ed5ab94f010619f69d6e189"
    of_more = {"bytes": 4, "sha256": sha256, "by": "driver"}
    told = {"stage": "stage1", "step": 1, "files": {"deep/weights": of_more}}
    manifest = told | {"sha256": hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()}
    assert read_json(newest.path / "manifest.json") == manifest
    (newest.path / "deep" / "weights").write_text("mor")
    assert steps(run_dir) == []


def test_a_finished_stage_names_its_checkpoint_or_what_to_delete(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    assert run_dir.finished_checkpoint("stage1") is None
    for step in (4, 5):
        write(run_dir, step)
    run_dir.finish_stage("stage1", 4)
    found = run_dir.finished_checkpoint("stage1")
    assert found is not None and found.step == 4
    (found.path / "manifest.json").unlink()
    with pytest.raises(RStarError, match=r"stage1 finished at step 4, but .*stage1-step-000004 is missing"):
        run_dir.finished_checkpoint("stage1")
    assert checkpoint_name("stage1", 1_234_567) == "stage1-step-1234567"


def test_versions_are_of_what_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "REPORTED_PACKAGES", ("no-such-package", "numpy", "neither", "pytest"))
    assert folder._installed_versions().keys() == {"numpy", "pytest"}


def test_what_is_half_written_goes_when_the_run_is_opened(tmp_path: Path):
    opened(tmp_path, {"a": 1})
    stale = tmp_path / "checkpoints" / ".tmp-stage1-step-000009"
    stale.mkdir(parents=True)
    (stale / "manifest.json").write_text("{}")
    assert RunDir(tmp_path).checkpoints("stage1") == []
    opened(tmp_path, {"a": 1})
    assert not stale.exists()


# -- figures of a step -------------------------------------------------------------------------------------------------


def measured(
    summaries: list[TrajectorySummary], kept: list[str], left_out: tuple[str, ...] = (), rollout_s: float = 4.0
) -> StepMetrics:
    timings = StepTimings(rollout_s=rollout_s, learn_s=2.0, publish_s=0.5, step_s=7.0)
    return step_metrics(
        summaries, stage="s", step=1, policy_version=1, kept_ids=kept, left_out_ids=left_out, timings=timings,
        update=UPDATE,
    )  # fmt: skip


def test_groups_are_all_right_all_wrong_or_mixed():
    rewards = {"a": (1.0, 1.0), "b": (0.0, 0.5), "c": (1.0, 0.0), "d": (1.0, 1.0)}
    summaries = [summary(g, n, reward=r) for g, both in rewards.items() for n, r in enumerate(both)]
    row = measured(summaries, ["c/0", "c/1", "a/0"], left_out=("a/0", "never"))
    assert (row.share_all_right, row.share_all_wrong, row.pass_rate, row.reward_mean) == (0.5, 0.25, 0.625, 0.6875)
    assert (row.groups_kept, row.groups_equal_dropped, row.trained_trajectories) == (2, 2, 2)
    figures = [
        row.loss,
        row.grad_norm,
        row.entropy,
        row.clip_share,
        row.logprob_diff_mean,
        row.logprob_diff_max,
        row.lr,
    ]
    assert figures == [-0.01, 0.4, 0.2, 0.0, 1e-7, 1e-6, 1e-4]
    assert [is_correct(summary("a", reward=reward)) for reward in (0.99, 1.0, 1.5)] == [False, True, True]


def test_nothing_rolled_out_is_no_division():
    row = measured([], [], rollout_s=0.0)
    assert (row.reward_mean, row.tokens_per_s, row.generate_s, row.share_all_right) == (0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"\['x', 'y', 'z'\] are not among the step's 1 rollouts"):
        measured([summary("a")], ["z", "y", "x", "zz"])


def test_wall_seconds_are_shared_as_rollouts_spent_theirs():
    both = [
        summary("a", generate_s=2.0, tool_s=1.0, verify_s=0.0),
        summary("b", generate_s=4.0, tool_s=0.0, verify_s=1.0),
    ]
    assert share_rollout_time(16.0, both) == (12.0, 2.0, 2.0)
    assert share_rollout_time(16.0, [summary("a", generate_s=0.0)]) == (16.0, 0.0, 0.0)
    assert tool_error_share_correct([summary("a", calls=4, failed=1), summary("b", calls=0)]) == 0.25
    assert tool_error_share_correct([summary("a", calls=0)]) is None


def test_the_line_of_a_step_and_of_sft():
    row = measured([summary("a", 0), summary("a", 1, reward=0.0)], [])
    assert progress_line(row, 5).startswith(
        "s 1/5 | reward 0.500  pass  50%  all right 0%  all wrong 0% | tool errors 0.0%"
    )
    assert "tool errors    -" in progress_line(replace(row, tool_error_share_correct=None), 5)
    sft = SftMetrics(step=3, loss=1.25, lr=2e-4, tokens_per_s=12_345.6, step_s=1.0)
    assert progress_line(sft, 100) == "sft   3/100 | loss 1.2500 | lr 2.0e-04 | 12,346 tok/s"


def test_tensorboard_shows_the_balancers_figures_and_forgets_what_is_repeated(tmp_path: Path):
    placed = PlacementFigures(
        rule="static", waiting_most=3, in_flight_most=2, kv_used_share=0.5, kv_used_share_most=0.6,
        kv_reserved_share=0.7, kv_reserved_share_most=0.8, preemptions=1, moves=0, recomputed_tokens=0, wait_p50_s=0.1,
        wait_p99_s=0.2,
    )  # fmt: skip
    row = replace(measured([summary("a")], []), balancer=placed)
    for after in (0, 1):
        with MetricsLog(tmp_path, stage="s", after_step=after, num_steps=9, show=lambda _: None) as log:
            for step in (1, 2, 3)[after:]:
                log.write(replace(row, step=step, reward_mean=float(10 * after + step)))
    board = EventAccumulator(str(tmp_path / "tensorboard" / "s"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward_mean")] == [(1, 1.0), (2, 12.0), (3, 13.0)]
    assert board.Scalars("balancer/waiting_most")[0].value == 3.0
    assert "balancer/rule" not in board.Tags()["scalars"]


# -- trajectories ------------------------------------------------------------------------------------------------------


def test_a_trajectory_is_written_turn_by_turn(tmp_path: Path):
    straight, mended, guess, _ = example_trajectories(1.0)
    row = readable(mended, decode, stage="s", step=3)
    assert list(row)[:4] == ["stage", "step", "rollout_id", "group_id"]
    assert [turn["outcomes"] for turn in row["turns"]] == [["error"], ["ok"], []]
    assert [turn["tool_response"] is None for turn in row["turns"]] == [False, False, True]
    assert row["turns"][0]["policy_versions"] == [3]
    assert (row["turns"][0]["generate_s"], row["turns"][0]["tool_s"]) == (0.2, 0.01)
    assert "".join(turn["completion"] + (turn["tool_response"] or "") for turn in row["turns"]) == decode(
        mended.response_ids.tolist()
    )
    assert [len(ids) for ids, _ in split_turns(straight)] == [turn.num_tokens for turn in straight.turns]
    path = tmp_path / "deep" / "t.jsonl"
    for _ in range(2):
        write_trajectories(path, [straight, guess], decode)
    assert [json.loads(line)["rollout_id"] for line in path.read_text().splitlines()] == ["gcd-17/0", "gcd-17/1"]
