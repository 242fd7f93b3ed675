"""Metrics: declared once, set without ever ending what is measured."""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from rstar_ray.algorithm.update import UpdateFigures
from rstar_ray.errors import Stopped
from rstar_ray.run_dir.ledger import Fate
from rstar_ray.run_dir.metrics import SftMetrics, StepMetrics, StepTimings, step_metrics
from rstar_ray.telemetry.__main__ import table
from rstar_ray.telemetry.declared import BY_NAME, METRICS, Kind, Metric
from rstar_ray.telemetry.meter import NO_METER, Meter
from rstar_ray.telemetry.steps import meter_fates, meter_step, under_way
from tests.fakes import KeptMetrics, summary

REPOSITORY = Path(__file__).parent.parent.parent
ROOMS = ("rstar_ray", "scheduler", "sandbox", "actors", "recipes")


def test_a_name_says_its_unit_and_its_kind():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("rstar_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert bool(metric.boundaries) == (metric.kind is Kind.HISTOGRAM)
        assert "run" not in metric.labels
    assert BY_NAME["rstar_step_seconds"].unit == "s"
    assert BY_NAME["rstar_generated_tokens_total"].unit == "tokens"
    assert BY_NAME["rstar_generation_tokens_per_second"].unit == "tokens/s"
    assert BY_NAME["rstar_step_end_timestamp_seconds"].unit == "s since the epoch"
    assert BY_NAME["rstar_detector_killed_total"].unit == ""


@pytest.mark.long
def test_every_declared_metric_is_set_somewhere_and_no_other():
    declaration = REPOSITORY / "rstar_ray/telemetry/declared.py"
    named: set[str] = set()
    for path in (path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py") if path != declaration):
        strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        named |= {text for text in strings if isinstance(text, str) and text.startswith("rstar_") and text in BY_NAME}
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        unknown = [
            call.args[0].value
            for call in calls
            if isinstance(call.func, ast.Attribute)
            and call.func.attr in ("set", "add", "reached", "observe")
            and call.args
            and isinstance(call.args[0], ast.Constant)
            and str(call.args[0].value).startswith("rstar_")
            and call.args[0].value not in BY_NAME
        ]
        assert not unknown, path
    assert named == BY_NAME.keys()


def test_the_documented_table_is_the_declaration():
    page = (REPOSITORY / "docs/metrics.md").read_text()
    assert page.partition("<!-- python -m rstar_ray.telemetry -->\n")[2].startswith(table())


def test_a_counter_that_is_known_whole_adds_what_came_since():
    kept = KeptMetrics()
    for total in (3, 5, 5, 2):  # the last began anew
        kept.meter.reached("rstar_balancer_moves_total", total)
    assert kept.values["rstar_balancer_moves_total"] == 7


def test_labels_tell_one_series_from_another():
    kept = KeptMetrics()
    kept.meter.reached("rstar_engine_steps_total", 3, replica="a")
    kept.meter.reached("rstar_engine_steps_total", 4, replica="b")
    assert kept.values["rstar_engine_steps_total{replica=a}"] == 3
    assert kept.values["rstar_engine_steps_total{replica=b}"] == 4


def test_what_has_no_meaning_leaves_a_gauge_as_it_is():
    kept = KeptMetrics()
    kept.meter.set("rstar_loss", 0.5, stage="stage1")
    kept.meter.set("rstar_loss", None, stage="stage1")
    kept.meter.add("rstar_steps_total", 0, stage="stage1")
    assert kept.values == {"rstar_loss{stage=stage1}": 0.5}


class Broken:
    def record(self, value: float, labels: Mapping[str, str]) -> None:
        raise RuntimeError("no agent is there")


def test_what_fails_is_one_line_and_ends_nothing():
    shown: list[str] = []
    meter = Meter(lambda metric: Broken(), shown.append)
    for _ in range(3):
        meter.set("rstar_loss", 0.5, stage="stage1")
    assert shown == ["the export of metrics is left out: RuntimeError: no agent is there"]


def test_figures_that_cannot_be_read_are_one_line_and_the_end_of_the_export():
    shown: list[str] = []
    kept = KeptMetrics(shown.append)
    with kept.meter.guarded():
        kept.meter.set("rstar_loss", 0.5, stage="stage1")
    with kept.meter.guarded():
        raise OSError("no such process")
    kept.meter.set("rstar_loss", 0.6, stage="stage1")
    assert kept.values == {"rstar_loss{stage=stage1}": 0.5}
    assert shown == ["the export of metrics is left out: OSError: no such process"]


@pytest.mark.parametrize("labels", [{}, {"stage": "a", "other": "b"}])
def test_a_metric_that_is_not_declared_so_is_left_out_and_named(labels: dict[str, str]):
    shown: list[str] = []
    KeptMetrics(shown.append).meter.set("rstar_loss", 0.5, **labels)
    assert shown[0].startswith("the export of metrics is left out: ValueError: no gauge rstar_loss with the labels")


def test_a_meter_without_a_place_does_nothing():
    NO_METER.set("rstar_no_such_metric", 1.0)
    assert NO_METER.run == ""


def step_row() -> StepMetrics:
    """A row in which every figure has a meaning."""
    update = UpdateFigures(
        loss=0.1, grad_norm=0.5, entropy=0.4, clip_share=0.01, logprob_diff_mean=1e-5, logprob_diff_max=1e-4, lr=1e-6
    )
    return step_metrics(
        [summary("a"), summary("b", reward=0.0, restarts=1, judge_retries=1)],
        stage="stage1",
        step=3,
        policy_version=3,
        kept_ids=["a", "b"],
        timings=StepTimings(rollout_s=5.0, learn_s=2.0, publish_s=0.5, step_s=8.0),
        update=update,
    )


def test_a_steps_phases_add_up_to_the_step(tmp_path: Path):
    kept, row = KeptMetrics(), step_row()
    meter_step(kept.meter, row, tmp_path)
    phases = [value for name, value in kept.values.items() if name.startswith("rstar_phase_seconds")]
    assert len(phases) == 6
    assert sum(phases) == pytest.approx(row.step_s)
    assert kept.values["rstar_reward_ratio{stage=stage1}"] == row.reward_mean
    assert 0 < kept.values["rstar_disk_free_bytes"] <= kept.values["rstar_disk_size_bytes"]


def test_every_metric_of_a_steps_row_is_set_by_it(tmp_path: Path):
    kept = KeptMetrics()
    meter_step(kept.meter, step_row(), tmp_path)
    meter_step(kept.meter, SftMetrics(step=2, loss=1.0, lr=1e-5, tokens_per_s=9.0, step_s=1.0, val_loss=2.0), tmp_path)
    meter_fates(kept.meter, [Fate.TRAINED, Fate.TRAINED, Fate.DROPPED], "stage1")
    assert kept.values["rstar_ledger_rollouts_total{fate=trained,stage=stage1}"] == 2
    with under_way(kept.meter, "stage1"):
        pass
    elsewhere = {
        "rstar_evaluation_pass_ratio",
        "rstar_checkpoint_seconds",
        "rstar_checkpoint_blocking_seconds",
    }
    set_here = {name.partition("{")[0] for name in kept.values}
    assert set_here == {m.name for m in METRICS if m.part in ("training", "ledger")} - elsewhere


def test_a_disk_that_does_not_answer_is_left_out(tmp_path: Path):
    kept = KeptMetrics()
    meter_step(kept.meter, step_row(), tmp_path / "gone")
    assert "rstar_disk_free_bytes" not in kept.values


def test_what_breaks_off_stays_under_way_and_what_was_stopped_does_not():
    kept = KeptMetrics()
    with pytest.raises(OSError), under_way(kept.meter, "stage1"):
        raise OSError
    assert kept.values == {"rstar_run_under_way{stage=stage1}": 1}
    with pytest.raises(Stopped), under_way(kept.meter, "stage1"):
        raise Stopped("asked to")
    assert kept.values == {"rstar_run_under_way{stage=stage1}": 0}


def test_a_metric_knows_its_part():
    assert isinstance(METRICS[0], Metric)
    assert {m.part for m in METRICS} == {
        *("training", "ledger", "engines", "balancer", "sandbox", "learner", "detector")
    }
