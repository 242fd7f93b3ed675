"""The report of a small run written by hand, to the letter; `data/report/` holds what a reader finds.

Whoever means to change a report writes these anew and reads what changed:
`python -m tests.rstar_ray.test_report_exact`.
"""

import json
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rstar_ray.report.browser import read_browser
from rstar_ray.report.compare import compare_runs
from rstar_ray.report.findings import duration, number, percent
from rstar_ray.report.markdown import markdown_report
from rstar_ray.report.page import page_data
from rstar_ray.report.plots import draw_plots, quantile
from rstar_ray.report.record import RunRecord, read_ledger, read_run, smooth
from rstar_ray.report.write import report_figures
from rstar_ray.run_dir.durable import append_row, to_row, write_json
from rstar_ray.run_dir.metrics import LongestRollout, PlacementFigures, StepMetrics
from tests.rstar_ray.fabricate import STAY

FOLDER = Path(__file__).parent / "data" / "report"
Row = dict[str, Any]


def step(stage: str, number: int, **more: Any) -> Row:
    """One RL step's row, with figures that all differ."""
    n = number + (10 if stage == "stage2" else 0)
    rule = "expected_kv" if stage == "stage1" else "worst_case"
    balancer = PlacementFigures(
        rule=rule, waiting_most=100 * n, in_flight_most=7 * n, kv_used_share=0.1 + n / 40,
        kv_used_share_most=0.15 + n / 40, kv_reserved_share=0.2 + n / 40, kv_reserved_share_most=0.25 + n / 40,
        preemptions=n, moves=2 * n, recomputed_tokens=11 * n, wait_p50_s=n / 4, wait_p99_s=float(n),
        held_s={"no room": n / 5},
    )  # fmt: skip
    longest = LongestRollout(
        rollout_id=f"{stage}/{number}/0-gcd/3", tokens=300 + n, turns=2, generate_s=1.5, tool_s=0.25, verify_s=0.125,
        turn_s=((1.25, 0.25), (0.25, 0.0)),
    )  # fmt: skip
    row = StepMetrics(
        stage=stage, step=number, policy_version=number, reward_mean=0.3 + n / 30, pass_rate=0.25 + n / 30,
        tool_error_share_correct=0.2 / n, calls_in_correct=50 + n, response_tokens_mean=90.0 - n,
        share_truncated=n / 100, turns_mean=2.0 + n / 50, calls_mean=1.0 + n / 50, share_all_right=n / 40,
        share_all_wrong=1 / (2 + n), groups_kept=3, groups_equal_dropped=1, rollouts=64, trained_trajectories=30 + n,
        tokens_generated=4_000 + n, tokens_per_s=1_450.0 - n, generate_s=2.0 + n / 10, tools_s=0.5, verify_s=0.25,
        learn_s=1.0, publish_s=0.125, step_s=4.25 + n / 10, loss=-n / 1_000, grad_norm=0.4 + n / 100,
        entropy=0.3 - n / 100, clip_share=n / 500, logprob_diff_mean=n / 1e4, logprob_diff_max=n / 1e3, lr=1e-4,
        restarts=number // 3, judge_retries=number // 5, balancer=balancer, longest=longest,
        memory_bytes={"driver": 2**28 + n, "learner": 2**31}, before_s=n / 8,
    )  # fmt: skip
    return json.loads(to_row(asdict(row) | more))


def evaluation(stage: str, number: int, score: float, **more: Any) -> Row:
    families = {"gcd": score - 0.1, "sum_of_two": score + 0.02, "power": score - 0.2}
    return {
        "stage": stage, "step": number, "set": "held-out", "model": "", "k": 4, "num_problems": 120, "temperature": 0.6,
        "top_p": 1.0, "max_response_tokens": 1_024, "max_turns": 6, "avg_at_k": score, "pass_at_k": score + 0.05,
        "maj_at_k": score + 0.01, "calls_mean": 1.5 + score,
        "ci_low": score - 0.03, "ci_high": score + 0.04, "tool_error_share_correct": 0.1 - score / 20,
        "response_tokens_mean": 80.4, "share_truncated": 0.015,
        "by_family": {name: {"avg_at_k": share} for name, share in families.items()},
        "by_difficulty": {"1": {"avg_at_k": score + 0.1}, "2": {"avg_at_k": score - 0.05}},
        "problems": f"evaluations/{stage}-step-{number:06d}-held-out-0f3a.jsonl",
    } | more  # fmt: skip


def trajectory(name: str, turns: list[Row], *, reward: float, problem: str = "Is 1 < 2?") -> Row:
    outcomes = [outcome for turn in turns for outcome in turn["outcomes"]]
    return {
        "rollout_id": name, "group_id": name.partition("/")[0], "problem_id": name.partition("/")[0],
        "problem": problem, "answer": "42", "family": "comparing", "difficulty": 2.0, "reward": reward,
        "stop_reason": "max_turns", "num_calls": len(outcomes), "num_failed": sum(o != "ok" for o in outcomes),
        "num_answers": 1, "num_response_tokens": 77, "verify_s": 0.25, "restarts": 1, "judge_retries": 2,
        "placements": [asdict(STAY)], "prompt": f"user: {problem}", "turns": turns,
    }  # fmt: skip


def turn(completion: str, response: str | None = None, *outcomes: str) -> Row:
    told = None if response is None else f"<|im_start|>user\n<tool_response>\n{response}\n</tool_response><|im_end|>\n"
    return {"completion": completion, "tool_response": told, "outcomes": list(outcomes), "num_tokens": 12,
            "token_chars": None, "version_runs": [[3, 7], [4, 5]], "generate_s": 0.125, "tool_s": 0.5}  # fmt: skip


def call(code: str, **more: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code, **more}})}</tool_call><|im_end|>"


ERR = turn(call("prnt(42)"), "NameError", "error")
MENDED = turn(call("print(42)", input="4\n2"), "42", "ok")
ANSWER = turn("So *it* is\n<answer>\\boxed{42}</answer><|im_end|>")
TRAJECTORIES = {
    "sft-held-out": [
        trajectory("right/0", [MENDED, ANSWER], reward=1.0),
        trajectory("guess/0", [turn("<answer>7</answer>")], reward=0.0),
        trajectory("gcd/0", [ERR, turn("<answer>41</answer>")], reward=0.0),
    ],
    "stage1-step-000001": [trajectory("late/0", [MENDED, ERR, ANSWER], reward=1.0)],
    "stage2-step-000002": [trajectory("sum/0", [ERR, MENDED, ANSWER], reward=1.0)],
    "stage2-held-out": [
        trajectory("gcd/1", [turn("I guess <answer>`42`</answer>")], reward=1.0),
        trajectory("gcd/2", [ERR, ANSWER], reward=1.0),
        trajectory("gcd/3", [turn("<tool_call>{oops"), turn("Hm " + "y" * 6_001), MENDED], reward=1.0),
        trajectory("guess/1", [ANSWER], reward=0.5),
    ],
}


def small_run(path: Path, *, seed: int = 3, resample: str = "paper", better: float = 0.0) -> Path:
    """SFT and two stages, of which the second went on once."""
    path.mkdir()
    algorithm = {"rollouts_per_prompt": 16, "keep": 8, "resample": resample}
    config = {"seed": seed, "scale": "tiny", "model": "", "prompts_per_step": 4, "algorithm": algorithm,
              "engine": {"replicas": 2}, "learner": {"ranks": 2}, "sandbox": {"executors": 1}}  # fmt: skip
    sft = config | {"prompts_per_step": 9, "algorithm": algorithm | {"resample": "none"}}
    write_json(path / "config.json", {"sft": sft, "stage1": config, "stage2": config | {"engine": {"replicas": 3}}})
    launch = {"started_at": "2026-01-05T10:00:00+00:00", "platform": "Linux", "cpus": 2, "scale": "tiny",
              "command": "train", "host": "h", "commit": "abc", "gpu_count": 0, "odd": None,
              "versions": {"python": "3.11", "torch": "2.13"}}  # fmt: skip
    for stage in ("sft", "stage1", "stage2", "stage2", "stage2"):
        append_row(path / "launches.jsonl", launch | {"stage": stage})
    (path / "finished").mkdir()
    for stage, at in (("sft", "10:02:00"), ("stage1", "10:31:30"), ("stage2", "11:35:00")):
        ended = {"stage": stage, "step": 1, "finished_at": f"2026-01-05T{at}+00:00"}
        write_json(path / "finished" / f"{stage}.json", ended)
    losses = (4.5, 2.25, None, 0.75, 0.5, 0.25)
    rows = [
        {"stage": "sft", "step": n, "loss": loss, "val_loss": 2.0 / n if n % 3 == 0 else None, "step_s": 0.5}
        for n, loss in enumerate(losses, 1)
    ]
    rows += [step("stage1", n) for n in range(1, 8)] + [step("stage2", n) for n in range(1, 4)]
    rows[8] |= {"tool_error_share_correct": None, "publish_s": 9.0}  # more than its step took
    rows[9]["balancer"]["set_aside"] = rows[10]["balancer"]["set_aside"] = ["r1: reports 5 of 4"]
    rows[13]["balancer"]["faults"] = ["r0 is left with 7 reserved tokens"]
    rows[14]["balancer"] = None
    for row in rows:
        append_row(path / "metrics.jsonl", row)
    for row in (
        evaluation("sft", 6, 0.25), evaluation("stage1", 4, 0.5), evaluation("stage1", 7, 0.625 + better),
        evaluation("stage2", 3, 0.0), evaluation("stage2", 3, 0.8125 + better),
        evaluation("sft", 6, 0.05, set="aime2024", tool_error_share_correct=None),
        evaluation("evaluate", 0, 0.1, set="aime2024", model="/models/other"),
    ):  # fmt: skip
        append_row(path / "evaluations.jsonl", row)
    (path / "trajectories").mkdir()
    for name, shown in TRAJECTORIES.items():
        stage, place = name.split("-", 1)
        at = int(place[5:]) if place.startswith("step") else {"sft": 6, "stage2": 3}[stage]
        for row in shown:
            append_row(path / "trajectories" / f"{name}.jsonl", {"stage": stage, "step": at} | row)
    (path / "trajectories" / "torn.jsonl").write_text('{"stage": "stage2"')
    return path


def short(values: Any) -> list[Any]:
    return [None if value is None or value != value else round(float(value), 6) for value in values]


def described(figure: Any) -> Row:
    """What a figure shows, without its looks."""
    panels: list[Row] = []
    for axes in figure.get_axes():
        legend = axes.get_legend()
        panels.append(
            {
                "title": axes.get_title(loc="left"),
                "labels": [axes.get_xlabel(), axes.get_ylabel()],
                "limits": short([*axes.get_xlim(), *axes.get_ylim()]),
                "lines": [[short(line.get_xdata()), short(line.get_ydata())] for line in axes.get_lines()],
                "bars": [[short(path.vertices[:, 0]), short(path.vertices[:, 1])]
                         for kept in axes.collections for path in kept.get_paths()],
                "areas": [short(patch.get_path().vertices.flatten()) for patch in axes.patches],
                "texts": [[text.get_text(), *short(text.get_position())] for text in axes.texts],
                "legend": [text.get_text() for text in legend.get_texts()] if legend else [],
                "ticks": [label.get_text() for label in axes.get_yticklabels()] if axes.yaxis.get_scale() == "linear"
                         else [],
            }
        )  # fmt: skip
    return {"size": short(figure.get_size_inches()), "panels": panels}


@contextmanager
def drawing() -> Iterator[dict[str, Row]]:
    """Figures that are saved meanwhile, described and not written."""
    drawn: dict[str, Row] = {}

    def noted(figure: Any, path: Path, **_: Any) -> None:
        drawn[path.name] = described(figure)

    with mock.patch("matplotlib.figure.Figure.savefig", noted):
        yield drawn


def made(folder: Path) -> dict[str, Any]:
    """Every part of the report, and of a comparison of three runs."""
    run = read_run(small_run(folder / "small"))
    better = small_run(folder / "better", seed=4, better=0.125)
    plain = small_run(folder / "plain", resample="none")
    with drawing() as drawn:
        plots = draw_plots(run, folder / "plots")
        compare_runs({"": [run.path, better, plain]}, folder / "compared")
    facts = report_figures(run)
    return {
        "report.md": markdown_report(run, plots),
        "page.json": page_data(run),
        "browser.json": browsed(run),
        "figures.json": facts | {"evaluations": {name: len(rows) for name, rows in facts["evaluations"].items()}},
        "drawn.json": drawn,
        "compare.md": (folder / "compared" / "compare.md").read_text("utf-8"),
        "compare.json": json.loads((folder / "compared" / "compare.json").read_text("utf-8")),
    }


def browsed(run: RunRecord) -> dict[str, Any]:
    """The trajectory browser's rows, and its texts as a page opens them."""
    browser, bodies = read_browser(run, read_ledger(run))
    return browser.as_json() | {"texts": [json.loads(zlib.decompress(body.texts)) for body in bodies]}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return made(tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("name", ["report.md", "compare.md"])
def test_a_reader_finds_what_is_written_there(parts: dict[str, Any], name: str):
    assert parts[name] == (FOLDER / name).read_text("utf-8")


@pytest.mark.parametrize("name", ["page.json", "browser.json", "figures.json", "drawn.json", "compare.json"])
def test_figures_and_drawings_are_what_they_were(parts: dict[str, Any], name: str):
    assert json.loads(json.dumps(parts[name])) == json.loads((FOLDER / name).read_text("utf-8"))


def test_times_shares_and_numbers_are_written_as_people_read_them():
    assert [duration(s) for s in (89.4, 90, 5_399, 5_400)] == ["89 s", "1.5 min", "90.0 min", "1.5 h"]
    assert [percent(None), percent(float("nan")), percent(0.1234), percent(0.1234, 0)] == ["–", "–", "12.3 %", "12 %"]
    assert [number(None), number(float("nan")), number(12_345.6)] == ["–", "–", "12,346"]


def test_a_quantile_of_few_values_is_one_of_them():
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.34, 0.67, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert quantile([0.0, 0.0], 0.99) == 1.0  # an axis needs a height


def test_a_window_is_centred_and_shorter_at_the_ends():
    assert smooth([0.0, 3.0, 6.0, 3.0, 12.0], 5) == [0.0, 3.0, 4.8, 7.0, 12.0]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0] and smooth([], 3) == []


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for name, part in made(Path(place)).items():
            text = part if isinstance(part, str) else json.dumps(part, indent=1, ensure_ascii=False) + "\n"
            (FOLDER / name).write_text(text, "utf-8")
