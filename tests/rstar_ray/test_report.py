import json
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from rstar_ray.config import RunConfig, with_values
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.run import HELD_OUT, run_evaluation
from rstar_ray.report import write
from rstar_ray.report.__main__ import main
from rstar_ray.report.findings import (
    before_after,
    facts,
    family_changes,
    headline,
    heldout_change,
    phase_times,
    placement_rows,
)
from rstar_ray.report.markdown import markdown_report
from rstar_ray.report.page import html_report
from rstar_ray.report.record import read_run, stage_spans, trajectory_files
from rstar_ray.report.stage_ends import stage_end_rows
from rstar_ray.report.write import write_report
from rstar_ray.run_dir.durable import append_row
from rstar_ray.run_dir.folder import RunDir
from tests.fakes import SkilledPolicy, adding_problems, fake_crew
from tests.rstar_ray.fabricate import run_directory

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
    assert re.match(r"Held-out pass@1 rose from [12]\d\.\d % to 8\d\.\d %\. Tool errors .* fell from", report.headline)
    assert report.headline in report.markdown_path.read_text()
    figures = json.loads((run_path / "report.json").read_text())
    assert figures["changes"]["heldout_pass_at_1"]["after"] > 0.85
    assert [row["stage"] for row in figures["evaluations"]["held-out"]] == ["sft", "stage1", "stage2", "stage3"]
    assert figures["stages"][1] == {"stage": "stage2", "first_rl_step": 31, "last_rl_step": 50}


@pytest.mark.long
def test_the_report_tells_where_rollouts_ran_and_what_was_set_aside(run_path: Path):
    write_report(run_path)
    markdown, page = ((run_path / name).read_text() for name in ("report.md", "report.html"))
    for shown in (markdown, page):
        assert "Where rollouts ran" in shown and "expected_kv" in shown
        assert "Set aside: generation/1: reports 5 KV tokens in use of 4 (Stage 1, step 2)" in shown
    row = placement_rows(read_run(run_path))[0]
    assert row[1:8] == ["expected_kv", "40", "24", "50 %", "75 %", "30", "60"]
    assert row[-1] == "2.5 s"


def test_stages_follow_each_other_on_one_axis(run_path: Path):
    run = read_run(run_path)
    assert [(span.name, span.start, span.end) for span in run.spans] == [
        ("stage1", 0, 30),
        ("stage2", 30, 50),
        ("stage3", 50, 66),
    ]
    assert run.column("rl_step") == [float(step) for step in range(1, 67)]
    assert [row["rl_step"] for row in run.heldout] == [0, 10, 20, 30, 40, 50, 60, 66]
    assert stage_spans([]) == ()


def test_a_repeated_evaluation_replaces_the_earlier_one(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 10})
    again = read_run(path).heldout[-1] | {"avg_at_k": 0.123}
    append_row(path / "evaluations.jsonl", again)
    assert [row["avg_at_k"] for row in read_run(path).heldout][1:] == [0.123]


async def test_an_evaluation_under_another_reward_or_seed_stands_beside_the_earlier_one(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 10})
    (path / "evaluations.jsonl").unlink()
    small = {"evaluate.samples": 1}
    ways = ({}, {"reward.name": "exact"}, {"seed": 5}, {})
    for step in (5, 10):
        for way in ways:
            config = with_values(RunConfig(), small | way)
            crew = fake_crew(SkilledPolicy())
            await run_evaluation(config, {HELD_OUT: adding_problems(2)}, crew, RunDir(path), step=step)
    run = read_run(path)
    assert [row["step"] for row in run.heldout] == [5] * 3 + [10] * 3
    assert [row["step"] for row in before_after(run)] == [10] * 3


def test_the_table_has_one_row_per_stage_with_its_last_evaluation(run_path: Path):
    rows = before_after(read_run(run_path))
    assert [(row["stage"], row["step"]) for row in rows] == [
        ("sft", 100),
        ("stage1", 30),
        ("stage2", 20),
        ("stage3", 16),
    ]


def test_what_a_model_wrote_is_data_on_the_page_and_never_markup(run_path: Path):
    page = html_report(read_run(run_path))
    assert "<script>alert" not in page
    assert page.count("</script>") == 2 + page.count('<script type="text/plain"')
    assert "<script>alert(1)</script>" in json.dumps(embedded(page)["browser"]["problems"])
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in page


def test_hostile_text_of_a_record_is_neither_markup_nor_a_terminal_s_command_and_stops_no_page(tmp_path: Path):
    """As a problem file or a model may hold it: HTML, backticks, control characters, half of a surrogate pair."""
    path = run_directory(tmp_path / "run", stages={"stage1": 2})
    hostile = "`</code>\n\n<img src=x onerror=alert(1)>``\r<script>alert(1)</script>\x1b[2J\x00\u202e\ud800"
    for file in (path / "trajectories").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row["answer"] = row["problem"] = hostile
            row["turns"][-1]["completion"] = f"{hostile}<answer>{hostile}</answer>"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown: list[str] = []
    report = write_report(path, shown.append)
    assert not shown
    text = report.markdown_path.read_bytes().decode()
    assert not [each for each in text if each < " " and each != "\n"] and not set(text) & set("\x7f\u202e")
    assert not re.search("<(img src=x|script)", MarkdownIt("commonmark", {"html": True}).render(text))
    page = report.html_path.read_bytes().decode()
    assert "<script>alert" not in page and "\\ud800" in json.dumps(embedded(page)["browser"]["problems"])


@pytest.mark.parametrize("stages", [{}, {"stage1": 1}])
def test_a_run_that_has_hardly_begun_can_be_reported(tmp_path: Path, stages: dict[str, int]):
    report = write_report(run_directory(tmp_path / "run", stages=stages))
    assert "Held-out pass@1" in report.headline
    assert embedded(report.html_path.read_text())["name"] == "run"


@pytest.mark.long
def test_a_run_without_correct_calls_updates_or_evaluations_can_be_reported(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 4})
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    empty = {"tool_error_share_correct": None, "loss": None, "reward_mean": 0.0}
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(row | empty) + "\n" for row in rows if row["stage"] != "sft")
    )
    for name in ("evaluations.jsonl", "launches.jsonl", "config.json"):
        (path / name).unlink()
    report = write_report(path)
    assert report.headline.startswith("Response length")
    assert "NaN" not in report.html_path.read_text()


def test_a_page_that_fails_is_a_shown_line_and_the_rest_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no such font\nin any folder")

    path, shown = run_directory(tmp_path / "run", stages={"stage1": 3}), list[str]()
    monkeypatch.setattr(write, "html_report", fail)
    write.write_report(path, shown.append)
    assert len(shown) == 1 and "report.html" in shown[0] and "no such font" in shown[0]
    assert (path / "report.md").exists() and (path / "report.json").exists()


def test_a_torn_last_line_does_not_stop_the_report(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 3})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "stage1", "st')
    assert len(read_run(path).steps) == 3


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="holds no metrics"):
        read_run(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "run_dir:" in capsys.readouterr().err


def test_phases_add_up_to_the_time_of_the_steps(run_path: Path):
    steps = read_run(run_path).steps
    phases = phase_times(steps)
    assert sum(phase.seconds for phase in phases) == pytest.approx(sum(row["step_s"] for row in steps))
    assert sum(phase.share for phase in phases) == pytest.approx(1)


def test_families_are_listed_from_the_hardest_at_first(run_path: Path):
    before = [change[1] for change in family_changes(read_run(run_path))]
    assert before == sorted(before) and len(before) == 9


def test_trajectories_lie_in_the_order_they_were_made(run_path: Path):
    titles = [file.title for file in trajectory_files(read_run(run_path))]
    assert titles == ["SFT, held-out", "Stage 3, step 1", "Stage 3, held-out"]


def test_an_evaluation_on_its_own_does_not_move_the_curve(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 10})
    row = read_run(path).heldout[-1] | {"stage": "evaluate", "step": 0, "avg_at_k": 0.5}
    append_row(path / "evaluations.jsonl", row)
    append_row(path / "evaluations.jsonl", row | {"set": "aime2024"})
    run = read_run(path)
    assert [row["stage"] for row in run.heldout] == ["sft", "stage1"]
    assert [row["rl_step"] for row in before_after(run, "aime2024")] == [10]
    assert "### aime2024" in markdown_report(run)


def test_two_models_or_two_protocols_on_one_set_are_two_rows_with_what_they_were_asked(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 10})
    row = read_run(path).heldout[-1] | {"stage": "evaluate", "step": 0, "set": "aime2024", "model": "/models/a"}
    for other in (row, row | {"avg_at_k": 0.25}, row | {"model": "/models/b"}, row | {"max_turns": 3, "top_p": 0.9}):
        append_row(path / "evaluations.jsonl", other)
    rows = before_after(read_run(path), "aime2024")
    assert [(row["model"], row["max_turns"]) for row in rows] == [
        ("/models/a", 30),
        ("/models/b", 30),
        ("/models/a", 3),
    ]
    assert rows[0]["avg_at_k"] == 0.25  # the same asked again replaces the earlier one
    report = markdown_report(read_run(path))
    assert "| /models/b | k 4, T 0.6, top-p 1, 30,720 tokens, 30 turns |" in report
    assert "k 4, T 0.6, top-p 0.9, 30,720 tokens, 3 turns" in report


def test_two_models_evaluated_alone_are_two_rows_and_no_course_of_one_run(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 3})
    row = read_run(path).heldout[-1] | {"stage": "evaluate", "step": 0}
    alone = tmp_path / "alone"
    alone.mkdir()
    for model, right in (("/models/a", 0.9), ("/models/b", 0.4)):
        append_row(alone / "evaluations.jsonl", row | {"model": model, "avg_at_k": right})
    run = read_run(alone)
    assert [row["model"] for row in before_after(run)] == ["/models/a", "/models/b"]
    assert heldout_change(run).before is None and "fell" not in headline(run)


def test_the_report_shows_what_decides_whether_a_stage_goes_on(run_path: Path):
    run = read_run(run_path)
    rows = stage_end_rows(run)
    assert [row[:2] for row in rows] == [["Stage 1", "30"], ["Stage 2", "20"], ["Stage 3", "16"]]
    late = [row for row in run.steps if row["stage"] == "stage1"][-20:]
    assert rows[0][3] == f"{sum(row['reward_mean'] for row in late) / 20:.2f}"
    assert rows[0][6] == f"{100 * sum(row['share_all_right'] for row in late[-10:]) / 10:.0f} %"
    assert "## Whether stages had more to teach" in markdown_report(run)
    short = run_directory(run_path.parent / "short", stages={"stage1": 4})
    assert stage_end_rows(read_run(short))[0][2] == "–"  # nothing came before its last steps


def test_facts_tell_how_long_it_took_and_how_often_it_went_on(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={"stage1": 3})
    first = read_run(path).launches[0]
    for stage in ("stage1", "stage1"):
        append_row(path / "launches.jsonl", first | {"stage": stage})
    known = dict(facts(read_run(path)))
    assert known["Started"].endswith(", resumed once")
    assert known["Finished"] == "Stage 1 after 11.5 min"
    assert known["Held-out"] == "108 problems, 4 rollouts of each"


def test_the_headline_of_sft_alone_is_about_its_loss(tmp_path: Path):
    path = run_directory(tmp_path / "run", stages={})
    (path / "evaluations.jsonl").unlink()
    assert re.match(r"SFT loss fell from 4\.\d+ to 0\.\d+ nats per token\.", headline(read_run(path)))
