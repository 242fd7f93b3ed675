"""`python -m rstar_ray.report RUN_DIR` reports on one run; with several it compares them."""

import argparse
import sys
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.report.compare import compare_runs
from rstar_ray.report.write import write_report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rstar_ray.report", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN_DIR[,RUN_DIR...]",
        help="one run directory to report on, or several to compare; runs without a NAME are grouped by algorithm, and "
        "where all have the same stand for themselves",
    )
    parser.add_argument(
        "--out", type=Path, help="where a comparison goes (default: comparison); one run's report goes into its folder"
    )
    options = parser.parse_args(arguments)
    groups: dict[str, list[str]] = {}
    for run in options.runs:
        name, _, paths = run.rpartition("=")
        groups.setdefault(name, []).extend(paths.split(","))
    try:
        if sum(map(len, groups.values())) == 1:
            if options.out is not None:
                raise ConfigError("--out", "the report of one run goes into its folder", "leave it out, or name more")
            report = write_report(next(iter(groups.values()))[0])
            print(f"{report.headline}\n{report.markdown_path}\n{report.html_path}")
        else:
            print(compare_runs(groups, options.out or Path("comparison")))
    except ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
