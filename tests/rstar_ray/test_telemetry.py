"""Metrics: declared once, set without ever ending what is measured."""

import ast
from pathlib import Path

import pytest

from rstar_ray.algorithm.update import UpdateFigures
from rstar_ray.run_dir.metrics import StepMetrics, StepTimings, step_metrics
from rstar_ray.telemetry.__main__ import table
from rstar_ray.telemetry.declared import BY_NAME, METRICS, Metric
from rstar_ray.telemetry.steps import meter_step
from tests.fakes import KeptMetrics, summary

REPOSITORY = Path(__file__).parent.parent.parent
ROOMS = ("rstar_ray", "scheduler", "sandbox", "actors", "recipes")


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


def test_figures_that_cannot_be_read_are_one_line_and_the_end_of_the_export(logged: list[str]):
    kept = KeptMetrics()
    with kept.meter.guarded():
        kept.meter.set("rstar_loss", 0.5, stage="stage1")
    with kept.meter.guarded():
        raise OSError("no such process")
    kept.meter.set("rstar_loss", 0.6, stage="stage1")
    assert kept.values == {"rstar_loss{stage=stage1}": 0.5}
    assert logged == ["the export of metrics is left out: OSError: no such process"]


@pytest.mark.parametrize("labels", [{}, {"stage": "a", "other": "b"}])
def test_a_metric_that_is_not_declared_so_is_left_out_and_named(labels: dict[str, str], logged: list[str]):
    KeptMetrics().meter.set("rstar_loss", 0.5, **labels)
    assert logged[0].startswith("the export of metrics is left out: ValueError: no gauge rstar_loss with the labels")


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


def test_a_disk_that_does_not_answer_is_left_out(tmp_path: Path):
    kept = KeptMetrics()
    meter_step(kept.meter, step_row(), tmp_path / "gone")
    assert "rstar_disk_free_bytes" not in kept.values


def test_a_metric_knows_its_part():
    assert isinstance(METRICS[0], Metric)
    assert {m.part for m in METRICS} == {
        *("training", "ledger", "engines", "balancer", "sandbox", "learner", "detector")
    }
