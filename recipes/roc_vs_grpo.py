"""What Resample-on-Correct does to tool errors: plain GRPO beside it, from the same SFT policies, seed by seed.

python recipes/roc_vs_grpo.py --seeds 5 --run-dir runs/experiment

Every arm trains stage 1 of the tiny world from its seed's SFT policy, with budgets that do not bind, so that arms
differ in resampling alone. The teacher slips more than for `make train`, so that no arm is done before the end: once
nearly all is right, most of what is still wrong comes after a failed call, and outcome reward alone drives those out.
With --tiny.coupling above 0 a failed first call costs the answer from the start. An interrupted experiment resumes with
the same command.
"""

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

from actors.launch.exit_status import status_of
from actors.launch.run import run
from actors.launch.run_paths import run_path
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from rstar_ray.config import RunConfig, TinyConfig, with_values
from rstar_ray.config.checks import at_least, at_most, check_bounds, require
from rstar_ray.config.options import options_of
from rstar_ray.config.recipe import Recipe
from rstar_ray.config.run import MOST_SEED
from rstar_ray.config.scales import TINY, at_scale
from rstar_ray.report.findings import percent
from rstar_ray.report.markdown import table
from rstar_ray.report.run_record import Row, RunRecord, read_run
from rstar_ray.run_dir.durable import write_text
from rstar_ray.run_dir.folder import RunDir

log = logging.getLogger(__name__)

ARMS: dict[str, dict[str, Any]] = {
    "plain GRPO": {"algorithm.resample": "none"},
    "RoC": {"algorithm.resample": "paper", "algorithm.least_failures": 0},
    "RoC, released rule": {"algorithm.resample": "release"},
    "GRPO, half at random": {"algorithm.resample": "random"},
}
"""Groups of 4 are trained on; plain GRPO draws 4, the others 8."""


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """An experiment: arms of one stage each, over seeds."""

    seeds: Annotated[int, at_least(1)] = 5
    """paired runs of every arm"""
    first_seed: Annotated[int, at_least(0)] = 0
    """seeds count up from it"""
    steps: Annotated[int, at_least(1)] = 45
    """steps of every arm"""
    learning_rate: Annotated[float, at_least(0)] = 3e-4
    """of every arm; twice stage 1's, which takes longer to the same end"""
    evaluate_every: Annotated[int, at_least(1)] = 10
    """steps between evaluations on the held-out problems"""
    max_response_tokens: Annotated[int, at_least(1), at_most(TINY["engine.max_context_tokens"] - 1)] = 256
    """budget of training rollouts [tokens]"""
    run_dir: str = ""
    """where the runs and the comparison go; empty is runs/experiment below the folder of the command"""
    tiny: TinyConfig = field(default_factory=lambda: TinyConfig(slips=0.65))

    def __post_init__(self) -> None:
        check_bounds("", self)
        last = self.first_seed + self.seeds - 1
        require(last <= MOST_SEED, "--seeds", f"the last seed would be {last}", f"end at {MOST_SEED} or below")


def experiment(config: ExperimentConfig) -> Path:
    """All runs that are not done, then the comparison; returns its markdown."""
    root = run_path(RunConfig(scale="tiny", run_dir=config.run_dir or "runs/experiment"))
    arms: dict[str, list[RunRecord]] = {name: [] for name in ARMS}
    report = root / "experiment.md"
    for seed in range(config.first_seed, config.first_seed + config.seeds):
        folder = root / f"seed-{seed}"
        base = {"seed": seed, **{f"tiny.{name}": value for name, value in vars(config.tiny).items()}}
        log.info("seed %d: SFT", seed)
        run([_at_tiny(SFT, {**base, "run_dir": str(folder / "sft")})])
        policy = RunDir(folder / "sft").finished_checkpoint("sft")
        assert policy is not None, "run() ended without it"
        for name, runs in arms.items():
            log.info("seed %d: %s", seed, name)
            path = folder / name.replace(", ", "-").replace(" ", "-").lower()
            run([_arm(config, {**base, **ARMS[name], "run_dir": str(path), "model": str(policy.path / "model")})])
            runs.append(read_run(path))
        write_text(report, comparison(arms))
        log.info("after seed %d: %s", seed, report)
    return report


POOL = 10
"""Steps over which a metric of training rollouts is pooled."""
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t for 1 degree of freedom and more; beyond the table the normal distribution's."""


def comparison(arms: Mapping[str, Sequence[RunRecord]]) -> str:
    """A table of the arms in Markdown. Their runs are paired by seed; the first arm is plain GRPO."""
    plain = next(iter(arms.values()))
    began = [tool_error_rate(run.steps[:POOL]) for run in plain]
    base = [run.heldout[-1]["avg_at_k"] for run in plain]
    rows: list[list[str]] = []
    for name, runs in arms.items():
        errors = [tool_error_rate(run.steps[-POOL:]) for run in runs]
        kept = [late / first if first else math.nan for late, first in zip(errors, began, strict=True)]
        accuracy = [run.heldout[-1]["avg_at_k"] for run in runs]
        tokens = [mean(run.column("response_tokens_mean")[-POOL:]) for run in runs]
        rows.append(
            [
                name,
                with_interval(errors, percent),
                with_interval(kept, "{:.2f}".format),
                with_interval(accuracy, percent),
                with_interval([100 * (own - of) for own, of in zip(accuracy, base, strict=True)], "{:+.1f}".format),
                with_interval(tokens, "{:,.0f}".format),
            ]
        )
    head = ["", "tool errors in correct rollouts", "of plain GRPO's first steps", "held-out pass@1", "gain, points"]
    return f"""# Resample-on-Correct against plain GRPO

{table([*head, "response tokens"], rows)}

Means over {len(plain)} seeds with 95 % intervals. Metrics of training rollouts are pooled over the last {POOL} steps;
the third column divides tool errors by those of plain GRPO in its first {POOL} steps.
"""


def tool_error_rate(steps: Sequence[Row]) -> float:
    """Failed tool calls over tool calls in the correct rollouts of these steps; NaN without a call."""
    calls = sum(row["calls_in_correct"] for row in steps)
    failed = sum((row["tool_error_rate_correct"] or 0.0) * row["calls_in_correct"] for row in steps)
    return failed / calls if calls else math.nan


def with_interval(values: Sequence[float], show: Callable[[float], str]) -> str:
    """The mean, and with more than one value the half width of its 95 % interval."""
    if len(values) < 2:
        return show(mean(values))
    t = T_975[len(values) - 2] if len(values) < len(T_975) + 2 else 1.96
    return f"{show(mean(values))} ± {show(t * stdev(values) / math.sqrt(len(values))).removeprefix('+')}"


def _arm(config: ExperimentConfig, values: dict[str, Any]) -> RunConfig:
    return _at_tiny(
        STAGE_1,
        {
            "steps": config.steps,
            "optimizer.learning_rate": config.learning_rate,
            "rollout.max_response_tokens": config.max_response_tokens,
            "rollout.max_turns": 8,
            "evaluate.every_steps": config.evaluate_every,
            **values,
        },
    )


def _at_tiny(recipe: Recipe, values: dict[str, Any]) -> RunConfig:
    return with_values(at_scale(recipe.paper, "tiny", recipe.tiny), values)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status as of every recipe."""

    def act() -> None:
        print(experiment(options_of(ExperimentConfig, argv, description=__doc__)))

    return status_of(act)


if __name__ == "__main__":
    sys.exit(main())
