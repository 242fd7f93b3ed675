"""Metrics: declared once, set without ever ending what is measured."""

import ast
from pathlib import Path

import pytest

from rstar_ray.run_dir.metrics import StepMetrics, progress_line
from rstar_ray.telemetry.__main__ import table
from rstar_ray.telemetry.registry import BY_EXPORTED_NAME, METRICS, PROCESS_METRICS, STEP_METRICS
from rstar_ray.telemetry.steps import export_step
from tests.fakes import KeptMetrics

REPOSITORY = Path(__file__).parent.parent.parent
ROOMS = ("rstar_ray", "scheduler", "sandbox", "actors", "recipes")


@pytest.mark.long
def test_every_process_metric_is_set_somewhere():
    registry = REPOSITORY / "rstar_ray/telemetry/registry.py"
    named: set[str] = set()
    for path in (path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py") if path != registry):
        strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        named |= {text for text in strings if isinstance(text, str) and text in BY_EXPORTED_NAME}
    assert named >= {metric.exported_name for metric in PROCESS_METRICS}


def test_names_are_unique():
    assert len(BY_EXPORTED_NAME) == len(METRICS) and len({metric.name for metric in STEP_METRICS}) == len(STEP_METRICS)


def test_the_printed_table_has_every_metric():
    assert all(f"`{metric.exported_name}`" in table() and metric.help in table() for metric in METRICS)


def test_a_step_is_exported_and_shown_by_the_registry(tmp_path: Path):
    values = {"reward_mean": 0.25, "entropy": 0.3, "restarts": 2, "memory_bytes/driver": 7, "publish/load_s": 0.5}
    kept = KeptMetrics()
    for step in (1, 2):
        row = StepMetrics(stage="s", step=step, values=values)
        export_step(kept.meter, row, tmp_path)
        assert progress_line(row, 10) == f"s  {step}/10 | reward 0.250"
    want = {
        "rstar_reward_mean{stage=s}": 0.25, "rstar_entropy{stage=s}": 0.3, "rstar_restarts_total{stage=s}": 4,
        "rstar_memory_bytes{stage=s,type=driver}": 7, "rstar_publish_load_s{stage=s}": 0.5, "rstar_step{stage=s}": 2,
    }  # fmt: skip
    assert {name: kept.values[name] for name in want} == want


def test_figures_that_cannot_be_read_are_one_line_and_the_end_of_the_export(logged: list[str]):
    kept = KeptMetrics()
    with kept.meter.guarded():
        kept.meter.set("rstar_loss", 0.5, stage="stage1")
    with kept.meter.guarded():
        raise OSError("no such process")
    kept.meter.set("rstar_loss", 0.6, stage="stage1")
    assert kept.values == {"rstar_loss{stage=stage1}": 0.5}
    assert logged == ["the export of metrics is skipped: OSError: no such process"]


@pytest.mark.parametrize("labels", [{}, {"stage": "a", "other": "b"}])
def test_a_metric_that_is_not_declared_so_is_left_out_and_named(labels: dict[str, str], logged: list[str]):
    KeptMetrics().meter.set("rstar_loss", 0.5, **labels)
    assert logged[0].startswith("the export of metrics is skipped: ValueError: no gauge rstar_loss with the labels")


def test_a_disk_that_does_not_answer_is_not_exported(tmp_path: Path):
    kept = KeptMetrics()
    export_step(kept.meter, StepMetrics(stage="s", step=1, values={}), tmp_path / "gone")
    assert "rstar_step{stage=s}" in kept.values and "rstar_disk_free_bytes" not in kept.values
