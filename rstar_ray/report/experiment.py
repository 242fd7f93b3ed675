"""Algorithms side by side over paired seeds: tool errors in correct rollouts as the paper's Figure 4 shows them.

Figures of training are pooled over ten steps; intervals are of the mean over seeds (Student's t, 95 %).
Legend: S seeds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.report.findings import number, percent
from rstar_ray.report.markdown import table
from rstar_ray.report.run_record import Row, RunRecord, read_run
from rstar_ray.run_dir.durable import write_json, write_text

POOL = 10
"""Steps whose rollouts a figure of training is taken over."""
T_975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantile of Student's t by degrees of freedom, from 0; beyond the table the normal's."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One algorithm, and its runs in the order of the seeds."""

    name: str
    runs: list[Path]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds [S], with the half width of its mean's 95 % interval (NaN for one seed)."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else math.nan

    @property
    def half_width(self) -> float:
        count = len(self.values)
        if count < 2:
            return math.nan
        variance = sum((value - self.mean) ** 2 for value in self.values) / (count - 1)
        t = T_975[count - 1] if count <= len(T_975) else 1.96
        return t * math.sqrt(variance / count)

    def shown(self, show: Callable[[float], str]) -> str:
        return show(self.mean) if math.isnan(self.half_width) else f"{show(self.mean)} ± {show(self.half_width)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One arm's figures over seeds."""

    name: str
    errors: Spread  # failed calls over calls in correct training rollouts, over the last `POOL` steps
    errors_left: Spread  # those over where errors began: the first arm's over its first `POOL` steps
    accuracy: Spread  # held-out pass@1 after the last step: at equal updates
    accuracy_gained: Spread  # that less the first arm's, seed by seed
    accuracy_at_tokens: Spread  # the same where every arm has generated as many tokens as the thriftiest in all
    tokens: Spread  # of a rollout, over the last `POOL` steps
    entropy: Spread  # nats a token, over the last `POOL` steps


def pooled_errors(steps: Sequence[Row]) -> float:
    """Failed calls over calls in the correct rollouts of these steps; NaN without a call."""
    calls = sum(row["calls_in_correct"] for row in steps)
    failed = sum((row["tool_error_share_correct"] or 0.0) * row["calls_in_correct"] for row in steps)
    return failed / calls if calls else math.nan


def at_tokens(run: RunRecord, start: float, budget: float) -> float:
    """Held-out pass@1 where the run had generated `budget` tokens, between two evaluations on a straight line.

    `start` is that of the policy it started from.
    """
    reached, total = {0: 0.0}, 0.0
    for row in run.steps:
        total += row["tokens_generated"]
        reached[row["rl_step"]] = total
    points = [(0.0, start)] + [
        (reached[row["rl_step"]], row["avg_at_k"])
        for row in run.heldout
        if row["rl_step"] in reached and row["rl_step"]
    ]
    for (before, low), (after, high) in pairwise(points):
        if budget <= after:
            return low + (high - low) * (budget - before) / (after - before)
    return points[-1][1]


def results(arms: Sequence[Sequence[RunRecord]], names: Sequence[str], starts: Sequence[Row]) -> list[ArmResult]:
    """`arms[i][s]` is arm i with seed s, the first arm plain GRPO; `starts[s]` that seed's SFT policy, evaluated.

    Errors began where the first arm's first steps have them: training rollouts are compared with training rollouts,
    and there are more correct ones than in an evaluation before training.
    """
    began = [pooled_errors(run.steps[:POOL]) for run in arms[0]]
    thriftiest = [min(sum(run.column("tokens_generated")) for run in of_seed) for of_seed in zip(*arms, strict=True)]
    found: list[ArmResult] = []
    for name, runs in zip(names, arms, strict=True):
        late = [run.steps[-POOL:] for run in runs]
        errors = [pooled_errors(steps) for steps in late]
        paired = list(zip(runs, starts, thriftiest, strict=True))
        found.append(
            ArmResult(
                name=name,
                errors=Spread(tuple(errors)),
                errors_left=Spread(tuple(left / first for left, first in zip(errors, began, strict=True))),
                accuracy=Spread(tuple(run.heldout[-1]["avg_at_k"] for run in runs)),
                accuracy_gained=Spread(
                    tuple(
                        run.heldout[-1]["avg_at_k"] - plain.heldout[-1]["avg_at_k"]
                        for run, plain in zip(runs, arms[0], strict=True)
                    )
                ),
                accuracy_at_tokens=Spread(
                    tuple(at_tokens(run, start["avg_at_k"], budget) for run, start, budget in paired)
                ),
                tokens=Spread(tuple(_mean(steps, "response_tokens_mean") for steps in late)),
                entropy=Spread(tuple(_mean(steps, "entropy") for steps in late)),
            )
        )
    return found


def _mean(steps: Sequence[Row], name: str) -> float:
    known = [row[name] for row in steps if row[name] is not None]
    return sum(known) / len(known) if known else math.nan


def write_experiment(out: Path, arms: Sequence[Arm], *, start_from: Sequence[Path]) -> Path:
    """Write experiment.md and experiment.json below `out` from the arms' run directories; returns the markdown's path.

    `start_from` are the SFT runs, seed by seed. Raises `ConfigError` where an arm lacks a seed.
    """
    if len({len(arm.runs) for arm in arms}) != 1 or len(arms[0].runs) != len(start_from):
        raise ConfigError("run_dir", "the arms have different numbers of runs", "run the experiment to its end")
    runs = [[read_run(path) for path in arm.runs] for arm in arms]
    starts = [read_run(path).heldout[-1] for path in start_from]
    names = [arm.name for arm in arms]
    found = results(runs, names, starts)
    write_json(out / "experiment.json", [asdict(one) for one in found])
    write_text(out / "experiment.md", markdown_experiment(found, starts))
    return out / "experiment.md"


def markdown_experiment(found: Sequence[ArmResult], starts: Sequence[Row]) -> str:
    """The table and what its columns are."""
    began = Spread(tuple(row["tool_error_share_correct"] for row in starts))
    accuracy = Spread(tuple(row["avg_at_k"] for row in starts))
    gaps = Spread(
        tuple(
            row["right_after_failed_call"] - row["right_without_failed_call"]
            for row in starts
            if row["right_after_failed_call"] is not None and row["right_without_failed_call"] is not None
        )
    )
    short = partial(percent, digits=1)
    rows = [
        [
            one.name,
            one.errors.shown(short),
            one.errors_left.shown(lambda value: f"{value:.2f}"),
            one.accuracy.shown(short),
            "" if one is found[0] else one.accuracy_gained.shown(lambda value: f"{100 * value:+.1f}"),
            one.accuracy_at_tokens.shown(short),
            one.tokens.shown(number),
            one.entropy.shown(lambda value: f"{value:.3f}"),
        ]
        for one in found
    ]
    head = [
        "",
        "tool errors in correct rollouts",
        "of where they began",
        "held-out pass@1",
        f"points over {found[0].name}",
        "at equal tokens",
        "tokens",
        "entropy",
    ]
    return "\n\n".join(
        [
            "# What resampling does to tool errors",
            f"The SFT policies, {len(starts)} seed{'s' * (len(starts) > 1)}: {began.shown(short)} of the calls in "
            f"correct rollouts fail, held-out pass@1 {accuracy.shown(short)}; share right after a first call that "
            f"failed, less the others': {100 * gaps.mean:+.1f} points.",
            table(head, rows),
            f"Mean over seeds with its 95 % interval. Training figures are pooled over the last {POOL} steps; errors "
            f"began where {found[0].name} has them over its first {POOL}. Held-out figures are after the last step, "
            "and at the number of generated tokens that the thriftiest arm needed.",
        ]
    ) + "\n"  # fmt: skip
