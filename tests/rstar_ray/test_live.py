"""A run that is under way, or that crashed, read for the page."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.report import live as live_page
from rstar_ray.report.live import LiveRun
from rstar_ray.report.page import html_report
from rstar_ray.report.run_record import read_run
from rstar_ray.report.write import write_report
from rstar_ray.run_dir.durable import append_row
from rstar_ray.run_dir.ledger import RolloutStatus, append_ledger
from rstar_ray.run_dir.tail import GrowingRows
from tests.rstar_ray.fabricate import run_directory, write_rows

pytestmark = pytest.mark.usefixtures("without_fsync")


def test_rows_are_taken_as_they_come_and_a_torn_one_when_it_is_whole(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    growing = GrowingRows(path)
    assert not growing.read() and growing.rows == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert growing.read() and growing.rows == [{"a": 1}]
    assert not growing.read()
    with path.open("a") as file:
        file.write('}\n{"a": 3}\n')
    assert growing.read() and [row["a"] for row in growing.rows] == [1, 2, 3]


def test_what_is_served_is_what_the_file_shows_and_grows_with_the_run(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 12})
    append_ledger(path, {"stage1/1/gcd-17/0": RolloutStatus.TRAINED}, stage="stage1", step=1, reasons={}, advantages={})
    live = LiveRun(path)
    assert live.changed()
    served: dict[str, Any] = live.data()
    assert not live.changed()
    written = json.loads(html_report(read_run(path)).partition('id="data">')[2].partition("</script>")[0])
    for data in (served, written):
        data.pop("footer"), data["browser"].pop("note")
    assert json.loads(json.dumps(served)) == written
    last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    append_row(path / "metrics.jsonl", last | {"step": 13})
    assert live.changed() and live.data()["x"][-1] == 13 and live.version == 2
    assert live.state().startswith("not running: Stage 1, step 13, ")


def test_steps_may_have_different_labels(tmp_path: Path, logged: list[str]):
    """The ages of trained tokens differ, the third step trained on nothing, and only the last one called a tool."""
    path = run_directory(tmp_path / "run", stages={"stage1": 4})
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()][-4:]
    labels = ({0: 1.0}, {1: 1.0}, {}, {0: 0.5, 1: 0.5})
    for row, shares in zip(rows, labels, strict=True):
        row |= {f"token_age_frac/{age}": share for age, share in shares.items()}
        if shares:
            row |= {"token_age_mean": sum(age * share for age, share in shares.items()), "token_age_max": max(shares)}
    for name in ("loss", "entropy", "grad_norm", "logprob_diff_mean", "logprob_diff_max", "lr"):
        del rows[2][name]
    rows[3] |= {"tool_calls/python": 1.0, "tool_error_rate/python": 0.5}
    write_rows(path / "metrics.jsonl", *rows)
    served = LiveRun(path).data()
    page = write_report(path).html_path.read_text()
    assert not logged
    for data in (served, json.loads(page.partition('id="data">')[2].partition("</script>")[0])):
        named = {row[0]: row[1] for row in data["metrics_rows"]}
        assert named["token_age_mean"] == "0.5" and named["tool_error_rate/python"] == "50.0 %"
        assert len(data["slow"]["because"]) == 4


def test_a_page_that_could_not_be_made_is_made_at_the_next_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("Stale file handle")

    live = LiveRun(run_directory(tmp_path / "run", stages={"stage1": 1}))
    with monkeypatch.context() as failing:
        failing.setattr(live_page, "page_data", fail)
        with pytest.raises(OSError, match="Stale"):
            live.data()
    assert live.changed() and live.version == 0
    live.data()
    assert not live.changed() and live.version == 1


def test_a_text_is_read_when_it_is_asked_for(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 12})
    append_ledger(path, {"stage1/1/gcd-17/0": RolloutStatus.TRAINED}, stage="stage1", step=1, reasons={}, advantages={})
    live = LiveRun(path)
    live.data()
    packed = live.block("texts", "stage1-step-000001.jsonl", 0)
    figures = live.block("figures", "stage1-step-000001.jsonl", 0)
    assert packed is not None and figures is not None
    texts = json.loads(zlib.decompress(packed))
    assert [one["id"] for one in texts] == ["gcd-17/0", "gcd-17/1"] and "print" in texts[0]["turns"][0]["completion"]
    assert len(json.loads(zlib.decompress(figures))) == 2
    ids = live.block("ids", "stage1", 1)
    assert ids is not None and json.loads(zlib.decompress(ids)) == {"gcd-17": {"0": 0}}
    for kind, where, place in (
        ("texts", "../config.json", 0),
        ("texts", "stage1-step-000001.jsonl", 99),
        ("ids", "s", 1),
    ):
        assert live.block(kind, where, place) is None


def test_a_run_is_under_way_while_the_process_that_holds_it_lives(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 1})
    live = LiveRun(path)
    assert LiveRun(run_directory(tmp_path / "sft", stages={})).state().startswith("not running: SFT, step 100, ")
    (path / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
    assert live.state().startswith("active: ")
    (path / ".lock").write_text(f"process {2**22 + 1} on {os.uname().nodename}\n")
    assert live.state().startswith("not running: ")
