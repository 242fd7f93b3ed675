"""The report of a run, made from its directory: tables, and a page with its trajectories."""

from rstar_ray.report.write import Report, write_report

__all__ = ["Report", "write_report"]
