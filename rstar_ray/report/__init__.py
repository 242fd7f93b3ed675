"""What a run did, from its directory alone: tables, plots, and a page with its trajectories."""

from rstar_ray.report.compare import compare_runs
from rstar_ray.report.write import Report, write_report

__all__ = ["Report", "compare_runs", "write_report"]
