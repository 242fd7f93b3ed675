import errno
from pathlib import Path

import pytest

from rstar_ray.run_dir import durable
from rstar_ray.run_dir.durable import append_row, cut_rows, read_json, read_rows, write_bytes, write_json


def test_a_crash_while_writing_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "config.json"
    write_json(path, {"seed": 1})

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_bytes(path, b"half")
    assert path.read_text() == '{\n  "seed": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_torn_last_row_is_left_out_and_removed_by_the_next_append(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    append_row(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert read_rows(path) == [{"step": 1}]
    append_row(path, {"step": 2})
    assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_half_a_surrogate_pair_is_written_and_read_back(tmp_path: Path):
    row = {"reason": "cannot read \ud83d (d\u00e9j\u00e0 vu)"}
    append_row(tmp_path / "rows.jsonl", row)
    write_json(tmp_path / "whole.json", row)
    assert read_rows(tmp_path / "rows.jsonl") == [row] == [read_json(tmp_path / "whole.json")]


def test_a_broken_row_in_the_middle_is_named_by_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\noops\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)


def test_cutting_touches_one_stage_and_an_absent_file_is_empty(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    assert cut_rows(path, stage="a", after_step=0) == 0
    for row in ({"stage": "a", "step": 1}, {"stage": "a", "step": 2}, {"stage": "b", "step": 2}):
        append_row(path, row)
    assert cut_rows(path, stage="a", after_step=1) == 1
    assert read_rows(path) == [{"stage": "a", "step": 1}, {"stage": "b", "step": 2}]
