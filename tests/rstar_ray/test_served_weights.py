"""The record of which weights each step left."""

from pathlib import Path

from rstar_ray.run_dir.served_weights import WEIGHTS, WeightsRecord


def test_steps_that_are_repeated_to_the_same_weights_keep_the_record_and_others_cut_it(tmp_path: Path):
    first = WeightsRecord(tmp_path, "stage1")
    for step in range(5):
        first.note(step, 10 + step, 100 + step)
    WeightsRecord(tmp_path, "stage2").note(0, 15, 1)
    again = WeightsRecord(tmp_path, "stage1")
    again.note(2, 12, 102)
    again.note(3, 13, 103)
    assert (again.last_step, again.version(4), again.version(5)) == (4, 14, None)
    again.note(3, 13, 999)
    assert (again.last_step, again.version(4)) == (3, None)
    kept = WeightsRecord(tmp_path, "stage1")
    assert (kept.last_step, kept.version(2), WeightsRecord(tmp_path, "stage2").version(0)) == (3, 12, 15)


def test_rollouts_that_a_step_was_trained_without_are_on_record(tmp_path: Path):
    record = WeightsRecord(tmp_path, "stage1")
    record.note(1, 2, 3, {"stage1/1/0-a/0": "a reason"})
    record.note(2, 3, 4)
    again = WeightsRecord(tmp_path, "stage1")
    assert [again.dropped(step) for step in (1, 2, 3)] == [{"stage1/1/0-a/0": "a reason"}, {}, {}]
    again.note(1, 2, 3, again.dropped(1))
    assert again.last_step == 2, "an equal row leaves those after it"
    again.note(1, 2, 3)
    assert again.last_step == 1, "the step was repeated with a rollout that it was trained without"


def test_a_damaged_record_is_replaced(tmp_path: Path):
    (tmp_path / WEIGHTS).write_text('{"torn\n{"stage": "stage1"}\n')
    record = WeightsRecord(tmp_path, "stage1")
    assert record.last_step == 0
    record.note(1, 2, 3)
    assert WeightsRecord(tmp_path, "stage1").version(1) == 2, "the damaged file is not in the way of later rows"
