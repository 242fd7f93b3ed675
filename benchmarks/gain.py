"""The gain of a policy over an earlier one, on problems that the earlier one does not always solve, without bias.

python -m benchmarks.gain CHOOSING BEFORE AFTER

Reads three files of evaluation rows (`evaluations/*.jsonl` of a run directory): two of the earlier policy with
different seeds, one of the later. The problems are those that not all rollouts of the first file solved. If the file
that selects the problems also measured them, the earlier policy would seem worse than it is, and any other better.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.figures import Interval, bootstrap_interval
from rstar_ray.run_dir.durable import read_rows

Rates = dict[str, float]
"""The share of correct rollouts, by problem id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Mean pass@1 of both policies on the chosen problems, and the difference with its 95 % interval over problems."""

    num_problems: int
    before: float
    after: float
    gain: float
    interval: Interval


def rates_of(path: Path) -> Rates:
    """Read an evaluation's rates. Raises `ConfigError` for a file without evaluation rows."""
    try:
        rows = read_rows(path)
        rates = {row["id"]: row["num_correct"] / row["k"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ConfigError(str(path), f"no rows of an evaluation ({wrong})", "give a file of evaluations/") from None
    if not rates:
        raise ConfigError(str(path), "no rows", "give a file of evaluations/")
    return rates


def gain_on_unsolved(choosing: Rates, before: Rates, after: Rates) -> Gain:
    """The gain on the problems that `choosing` does not always solve.

    Raises `ConfigError` if the files have different problems, or all problems are solved.
    """
    if not choosing.keys() == before.keys() == after.keys():
        raise ConfigError("the three files", "they are of different problems", "evaluate the same set three times")
    chosen = sorted(name for name, rate in choosing.items() if rate < 1.0)
    if not chosen:
        raise ConfigError("the first file", "every problem is always solved", "give one of a policy that fails")
    differences = [after[name] - before[name] for name in chosen]
    return Gain(
        num_problems=len(chosen),
        before=sum(before[name] for name in chosen) / len(chosen),
        after=sum(after[name] for name in chosen) / len(chosen),
        gain=sum(differences) / len(differences),
        interval=bootstrap_interval([(difference, 1) for difference in differences]) or (0.0, 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class GainOptions:
    choosing: Annotated[Path, tyro.conf.Positional]
    """of the earlier policy: says which problems"""
    before: Annotated[Path, tyro.conf.Positional]
    """of the earlier policy, with another --seed"""
    after: Annotated[Path, tyro.conf.Positional]
    """of the later policy"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(GainOptions, _print_gain, argv, description=__doc__)


def _print_gain(options: GainOptions) -> None:
    choosing, before, after = (rates_of(path) for path in (options.choosing, options.before, options.after))
    print(json.dumps(asdict(gain_on_unsolved(choosing, before, after))))


if __name__ == "__main__":
    sys.exit(main())
