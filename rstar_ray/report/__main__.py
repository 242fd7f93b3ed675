"""`python -m rstar_ray.report RUN_DIR` writes the report of a run into its folder."""

import argparse
import sys
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.report.write import write_report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rstar_ray.report", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the run to report on")
    try:
        report = write_report(parser.parse_args(arguments).run)
    except ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2
    print(f"{report.headline}\n{report.markdown_path}\n{report.html_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
