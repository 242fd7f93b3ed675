"""`python -m rstar_ray.report RUN_DIR` writes the report of a run into its folder."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rstar_ray.config.options import run_command
from rstar_ray.report.write import write_report


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(ReportOptions, _report, argv, description=__doc__)


def _report(options: ReportOptions) -> None:
    report = write_report(options.run)
    print(f"{report.headline}\n{report.markdown_path}\n{report.html_path}")


if __name__ == "__main__":
    sys.exit(main())
