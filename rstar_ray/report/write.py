"""Writes report.md and report.html into a run directory."""

import logging
from dataclasses import dataclass
from pathlib import Path

from rstar_ray.report.findings import headline
from rstar_ray.report.markdown import markdown_report
from rstar_ray.report.page import html_report
from rstar_ray.report.run_record import read_run
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import write_text

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """The files of a report, and its first lines."""

    headline: str
    markdown_path: Path
    html_path: Path


def write_report(run_path: Path | str) -> Report:
    """Write the report from the run directory; an earlier report is replaced.

    The run may still be active. A part that fails, or a file that cannot be read, is logged. Raises `ConfigError`
    if there is no run.
    """
    run = read_run(run_path)
    for fault in run.faults:
        log.warning(fault)
    report = Report(headline(run), run.path / "report.md", run.path / "report.html")
    with best_effort(report.markdown_path.name):
        write_text(report.markdown_path, markdown_report(run))
    with best_effort(report.html_path.name):
        write_text(report.html_path, html_report(run))
    return report
