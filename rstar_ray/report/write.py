"""All of a run's report at once: report.md, report.json and report.html, in the run directory."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_ray.report.findings import (
    Change,
    before_after,
    facts,
    headline,
    heldout_change,
    length_change,
    other_sets,
    phase_times,
    reward_change,
    sft_change,
    tool_error_change,
)
from rstar_ray.report.markdown import markdown_report
from rstar_ray.report.page import html_report
from rstar_ray.report.run_record import RunRecord, read_run
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import write_json, write_text

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """Where a report lies and its first lines."""

    headline: str
    markdown_path: Path
    html_path: Path


def write_report(run_path: Path | str) -> Report:
    """Make the report from the run directory alone; an earlier one is replaced.

    Works on a run that is still going. A part that fails, or what cannot be read, is logged. Raises `ConfigError`
    where there is no run.
    """
    run = read_run(run_path)
    for fault in run.faults:
        log.warning(fault)
    report = Report(headline(run), run.path / "report.md", run.path / "report.html")
    with best_effort(report.markdown_path.name):
        write_text(report.markdown_path, markdown_report(run))
    with best_effort(report.html_path.name):
        write_text(report.html_path, html_report(run))
    with best_effort("report.json"):
        write_json(run.path / "report.json", report_figures(run))
    return report


def report_figures(run: RunRecord) -> dict[str, Any]:
    """The report's figures for other programs; shares and seconds as numbers."""
    changes = {"heldout_pass_at_1": heldout_change(run)}
    if run.steps:
        changes["tool_error_share_correct"] = tool_error_change(run)
        changes["response_tokens_mean"] = length_change(run)
        changes["reward_mean"] = reward_change(run)
    if run.sft:
        changes["sft_loss"] = sft_change(run)
    return {
        "name": run.name,
        "headline": headline(run),
        "algorithm": run.algorithm,
        "changes": {name: _change(change) for name, change in changes.items()},
        "stages": [
            {"stage": span.name, "first_rl_step": span.start + 1, "last_rl_step": span.end} for span in run.spans
        ],
        "evaluations": {name: before_after(run, name) for name in ["held-out", *other_sets(run)]},
        "seconds_by_phase": {phase.phase: phase.seconds for phase in phase_times(run.steps)},
        "step_seconds": {"sft": _seconds(run.sft), "rl": _seconds(run.steps)},
        "facts": dict(facts(run)),
    }


def _change(change: Change) -> dict[str, float | None]:
    return {"before": change.before, "after": change.after}


def _seconds(rows: list[dict[str, Any]]) -> float:
    return sum(row["step_s"] for row in rows)
