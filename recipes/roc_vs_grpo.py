"""What Resample-on-Correct does to tool errors: plain GRPO beside it, from the same SFT policies, seed by seed.

python recipes/roc_vs_grpo.py --seeds 5 --run-dir runs/experiment

Every arm trains stage 1 of the tiny world from its seed's SFT policy, with budgets that do not bind, so that arms
differ in resampling alone. The teacher slips more than for `make train`, so that no arm is done before the end: once
nearly all is right, most of what is still wrong comes after a failed call, and outcome reward alone drives those out.
With --tiny.coupling above 0 a failed first call costs the answer from the start. An interrupted experiment goes on with
the same command.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.launch.exit_status import status_of
from actors.launch.run import run
from actors.launch.run_paths import run_path
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from rstar_ray.config import RunConfig, TinyConfig, with_values
from rstar_ray.config.checks import at_least, at_most
from rstar_ray.config.options import options_of
from rstar_ray.config.recipe import Recipe
from rstar_ray.config.run import MOST_SEED
from rstar_ray.config.scales import TINY, at_scale
from rstar_ray.report.experiment import Arm, write_experiment
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

    seeds: int = 5
    """paired runs of every arm"""
    first_seed: int = 0
    """seeds count up from it"""
    steps: int = 45
    """steps of every arm"""
    learning_rate: float = 3e-4
    """of every arm; twice stage 1's, which takes longer to the same end"""
    evaluate_every: int = 10
    """steps between evaluations on the held-out problems"""
    max_response_tokens: int = 256
    """budget of training rollouts [tokens]"""
    run_dir: str = ""
    """where the runs and the comparison go; empty is runs/experiment below the folder of the command"""
    tiny: TinyConfig = field(default_factory=lambda: TinyConfig(slips=0.65))

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds, steps=self.steps, evaluate_every=self.evaluate_every)
        at_least(0, first_seed=self.first_seed, learning_rate=self.learning_rate)
        at_least(1, max_response_tokens=self.max_response_tokens)
        at_most(MOST_SEED, seeds=self.first_seed + self.seeds - 1)
        most = TINY["engine.max_context_tokens"] - 1
        at_most(most, max_response_tokens=self.max_response_tokens)


def experiment(config: ExperimentConfig) -> Path:
    """All runs that are not done, then the comparison; returns its markdown."""
    root = run_path(RunConfig(scale="tiny", run_dir=config.run_dir or "runs/experiment"))
    arms = [Arm(name, []) for name in ARMS]
    policies: list[Path] = []
    report = root / "experiment.md"
    for seed in range(config.first_seed, config.first_seed + config.seeds):
        folder = root / f"seed-{seed}"
        base = {"seed": seed, **{f"tiny.{name}": value for name, value in vars(config.tiny).items()}}
        log.info(f"seed {seed}: SFT")
        run([_at_tiny(SFT, {**base, "run_dir": str(folder / "sft")})])
        policy = RunDir(folder / "sft").finished_checkpoint("sft")
        assert policy is not None, "run() ended without it"
        policies.append(folder / "sft")
        for arm in arms:
            log.info(f"seed {seed}: {arm.name}")
            arm.runs.append(folder / arm.name.replace(", ", "-").replace(" ", "-").lower())
            values = {**base, **ARMS[arm.name], "run_dir": str(arm.runs[-1]), "model": str(policy.path / "model")}
            run([_arm(config, values)])
        report = write_experiment(root, arms, start_from=policies)
        log.info(f"after seed {seed}: {report}")
    return report


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
