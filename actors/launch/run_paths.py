"""Folders for a command's results."""

import os
from pathlib import Path

from rstar_ray.config import RunConfig


def run_path(config: RunConfig) -> Path:
    """The absolute run directory.

    In a Ray job, a relative path is resolved beside `runs`: the job's working folder is deleted with its session.
    """
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if config.run_dir:
        runs = os.environ.get("RSTAR_RAY_RUNS")
        start = (Path(runs).parent if runs else Path.home()) if in_job else Path.cwd()
        return (start / Path(config.run_dir).expanduser()).absolute()
    runs = os.environ.get("RSTAR_RAY_RUNS") or (Path.home() / "rstar_ray_runs" if in_job else Path.cwd() / "runs")
    return Path(runs).absolute() / config.scale
