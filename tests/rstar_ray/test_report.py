import json
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from rstar_ray.report import write
from rstar_ray.report.__main__ import main
from rstar_ray.report.findings import before_after
from rstar_ray.report.markdown import markdown_report
from rstar_ray.report.page import html_report, page_data
from rstar_ray.report.run_record import read_run
from rstar_ray.report.segments import tool_answers
from rstar_ray.report.write import write_report
from rstar_ray.run_dir.durable import append_row
from tests.rstar_ray.fabricate import run_directory, write_rows

pytestmark = pytest.mark.usefixtures("without_fsync")


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_directory(tmp_path_factory.mktemp("runs") / "tiny")


def embedded(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_report_is_made_from_the_directory_alone(run_path: Path):
    report = write_report(run_path)
    assert main([str(run_path)]) == 0
    assert re.match(r"Held-out pass@1 rose from [12]\d\.\d % to 8\d\.\d %\. Tool errors .* fell from", report.headline)
    assert report.headline in report.markdown_path.read_text()
    data = embedded(report.html_path.read_text())
    assert [row[0] for row in data["results"][0]["rows"]] == ["SFT", "Stage 1", "Stage 2", "Stage 3"]
    assert data["spans"][1] == {"name": "stage2", "start": 30, "end": 50, "title": "Stage 2"}
    assert "| ok | Reward |" in report.markdown_path.read_text()


def test_the_page_has_every_metric_of_every_stage_by_its_reduction(run_path: Path):
    data = embedded(html_report(read_run(run_path)))
    assert data["metrics_head"][:4] == ["metric", "Stage 1", "Stage 2", "Stage 3"]
    rows = {row[0]: row for row in data["metrics_rows"]}
    assert rows["tokens_generated"][1] == f"{30 * 256 * 60:,}" and rows["balancer/queue_len_max"][1] == "40"
    assert rows["frac_truncated"][1].endswith(" %") and "kl" not in rows


def test_tokens_per_second_over_the_steps_is_their_throughput(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 2})
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()][-2:]
    speeds = ({"tokens_generated": 8_000, "tokens_per_s": 800.0}, {"tokens_generated": 8_000, "tokens_per_s": 8_000.0})
    write_rows(path / "metrics.jsonl", *(row | speed for row, speed in zip(rows, speeds, strict=True)))
    (speed,) = [row[1] for row in page_data(read_run(path))["metrics_rows"] if row[0] == "tokens_per_s"]
    assert speed == f"{16_000 / 11:,.0f}"


def test_what_a_model_wrote_is_data_on_the_page_and_never_markup(run_path: Path):
    page = html_report(read_run(run_path))
    assert "<script>alert" not in page
    assert page.count("</script>") == 2 + page.count('<script type="text/plain"')
    assert "<script>alert(1)</script>" in json.dumps(embedded(page)["browser"]["problems"])
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in page


def test_hostile_text_of_a_record_is_neither_markup_nor_a_terminal_s_command_and_stops_no_page(
    tmp_path: Path, logged: list[str]
):
    """As a problem file or a model may hold it: HTML, backticks, control characters, half of a surrogate pair."""
    path = run_directory(tmp_path / "run", stages={"stage1": 2})
    hostile = "`</code>\n\n<img src=x onerror=alert(1)>``\r<script>alert(1)</script>\x1b[2J\x00\u202e\ud800"
    for file in (path / "trajectories").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row["answer"] = row["problem"] = hostile
            row["turns"][-1]["completion"] = f"{hostile}<answer>{hostile}</answer>"
        write_rows(file, *rows)
    report = write_report(path)
    assert not logged
    text = report.markdown_path.read_bytes().decode()
    assert not [each for each in text if each < " " and each != "\n"] and not set(text) & set("\x7f\u202e")
    assert not re.search("<(img src=x|script)", MarkdownIt("commonmark", {"html": True}).render(text))
    page = report.html_path.read_bytes().decode()
    assert "<script>alert" not in page and "\\ud800" in json.dumps(embedded(page)["browser"]["problems"])


@pytest.mark.long
def test_a_run_without_correct_calls_updates_or_evaluations_can_be_reported(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 4})
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    empty = {"tool_error_rate_correct": None, "loss": None, "reward_mean": 0.0}
    write_rows(path / "metrics.jsonl", *(row | empty for row in rows if row["stage"] != "sft"))
    for name in ("evaluations.jsonl", "launches.jsonl", "config.json"):
        (path / name).unlink()
    report = write_report(path)
    assert report.headline.startswith("Response length")
    assert "NaN" not in report.html_path.read_text()


def test_a_run_has_a_page_after_its_first_step(tmp_path: Path):
    data = page_data(read_run(run_directory(tmp_path / "run", stages={"stage1": 1})))
    (reward,) = (tile["value"] for tile in data["tiles"] if tile["name"] == "Training reward")
    assert reward == f"{data['lines'][1]['values'][0]:.2f}"


def test_a_page_that_fails_is_a_shown_line_and_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
):
    def fail(*_: object) -> None:
        raise RuntimeError("no such font\nin any folder")

    path = run_directory(tmp_path / "run", stages={"stage1": 3})
    monkeypatch.setattr(write, "html_report", fail)
    write.write_report(path)
    assert len(logged) == 1 and "report.html" in logged[0] and "no such font" in logged[0]
    assert (path / "report.md").exists()


def test_an_evaluation_on_its_own_does_not_move_the_curve(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 10})
    row = read_run(path).heldout[-1] | {"stage": "evaluate", "step": 0, "avg_at_k": 0.5}
    append_row(path / "evaluations.jsonl", row)
    append_row(path / "evaluations.jsonl", row | {"set": "aime2024"})
    run = read_run(path)
    assert [row["stage"] for row in run.heldout] == ["sft", "stage1"]
    assert [row["rl_step"] for row in before_after(run, "aime2024")] == [10]
    assert "## Evaluation: aime2024" in markdown_report(run)


def test_a_chart_has_the_title_of_its_figures_and_each_component_and_tool_a_chart(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 3})
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    named = {"reward_component/length": -0.5, "tool_calls/python": 1.5, "tool_calls/search": 0.5}
    write_rows(path / "metrics.jsonl", *(row | named if row["stage"] == "stage1" else row for row in rows))
    run = read_run(path)
    lines = {line["title"]: line for line in page_data(run)["lines"]}
    (errors,) = [title for title in lines if title.startswith("Tool errors")]
    assert "training" in errors and "held-out" not in errors
    assert lines["Reward component: length"]["values"] == [-0.5] * 3
    assert lines["Calls of python per rollout"]["top"] == 2 and "Calls of search per rollout" in lines


def test_a_failed_call_whose_result_the_policy_was_not_shown_is_named():
    (shown,) = tool_answers({"tool_response": None, "outcomes": ["error"]})
    assert shown.outcome == "error"
    assert tool_answers({"tool_response": None, "outcomes": []}) == []
