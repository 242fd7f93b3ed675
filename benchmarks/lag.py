"""The effect of older weights on learning: `python -m benchmarks.lag` trains at scale tiny with a fixed lag.

Runs are synchronous, and engines serve the weights of `k` steps before: every token has exactly that age, independent
of timing. This is the worst case of `--staleness k`. Each arm is one stage from its seed's SFT policy; `none`, which a
run with a staleness refuses, is compared with the corrections. An arm takes about 3 minutes on two cores. The same
command resumes with the first arm that is not done, from its start; with `--minutes` it ends between two arms.

    python -m benchmarks.lag --minutes 15
    python -m benchmarks.lag --seeds 1 --rates 3 10 --minutes 15
"""

import logging
import shutil
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal
from unittest.mock import patch

from actors.generation.replicas import Replicas
from actors.launch.exit_status import status_of
from actors.launch.run import run
from actors.launch.run_paths import run_path
from actors.weights.transfer import Publication
from benchmarks.evidence import cell
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.checks import at_least, check_bounds, require
from rstar_ray.config.options import options_of
from rstar_ray.config.scales import at_scale
from rstar_ray.errors import ConfigError, NothingLearned
from rstar_ray.report.findings import percent
from rstar_ray.report.markdown import table
from rstar_ray.report.run_record import RunRecord, read_run
from rstar_ray.run_dir.durable import write_text
from rstar_ray.run_dir.folder import RunDir, flatten

log = logging.getLogger(__name__)

Correction = Literal["none", "sampler", "token", "icepop", "dppo"]
CORRECTIONS: dict[Correction, dict[str, Any]] = {
    "none": {"algorithm.correction": "none"},
    "sampler": {"algorithm.correction": "sampler"},
    "token": {"algorithm.correction": "token"},
    "icepop": {"algorithm.correction": "icepop"},
    "dppo": {"algorithm.loss": "dppo"},
}
LEARNING_RATE = 3e-4


@dataclass(frozen=True, kw_only=True)
class LagConfig:
    """Arms of one stage each."""

    seeds: Annotated[int, at_least(1)] = 3
    """runs of every arm"""
    lags: tuple[int, ...] = (0, 1, 2, 4, 8)
    """steps by which engines stay behind; 0 is the run that the others are compared with"""
    corrections: tuple[Correction, ...] = ("none", "sampler", "token", "icepop", "dppo")
    """of every lag above 0"""
    rates: tuple[float, ...] = (1.0,)
    """learning rates, as multiples of 3e-4"""
    steps: Annotated[int, at_least(1)] = 40
    """steps of every arm"""
    evaluate_every: Annotated[int, at_least(1)] = 10
    """steps between evaluations on the held-out problems"""
    minutes: Annotated[float, at_least(0)] = 0.0
    """after which no arm begins any more; 0: all arms are run"""
    run_dir: str = ""
    """where the runs and the table go; empty is runs/lag below the folder of the command"""

    def __post_init__(self) -> None:
        check_bounds("", self)
        require(min(self.lags, default=-1) >= 0, "--lags", f"give steps, 0 or more (got {self.lags})", "leave it out")
        require(min(self.rates, default=0.0) > 0, "--rates", f"give multiples above 0 (got {self.rates})", "give 1")

    @property
    def arms(self) -> list[tuple[float, int, Correction]]:
        """Rate, lag and correction; with a lag of 0 all corrections are equal."""
        return [
            (rate, lag, correction)
            for rate in self.rates
            for lag in self.lags
            for correction in (self.corrections if lag else ("none",))
        ]


@contextmanager
def lagging(steps: int) -> Generator[None]:
    """Replicas serve the weights of `steps` publishes before; until there are so many, the first ones."""
    publish = Replicas.publish
    recent, served = deque[Publication](maxlen=steps + 1), list[Publication]()

    async def publish_late(replicas: Replicas, weights: Publication) -> None:
        recent.append(weights)
        if served[-1:] != [recent[0]]:
            served[:] = [recent[0]]
            await publish(replicas, recent[0])

    with patch.object(Replicas, "publish", publish_late):
        yield


def experiment(config: LagConfig) -> Path:
    """Run the arms that are not done, within the time limit; returns the table's path.

    Raises `ConfigError` where an arm was run with other steps or evaluations, and the error of a run that ended for
    another reason than its training; such an arm is not done.
    """
    began_s, root = time.monotonic(), run_path(RunConfig(scale="tiny", run_dir=config.run_dir or "runs/lag"))
    report = root / "lag.md"
    runs: dict[tuple[float, int, Correction], list[RunRecord]] = {arm: [] for arm in config.arms}
    paths = {
        (seed, arm): root / f"seed-{seed}" / "rate-{:g}-lag-{}-{}".format(*arm)
        for seed in range(config.seeds)
        for arm in config.arms
    }
    for path in paths.values():
        if (path / "done").exists():
            _refuse_other_settings(config, path)
    for (seed, arm), path in paths.items():
        if not (path / "done").exists():
            if config.minutes and time.monotonic() - began_s > 60 * config.minutes:
                log.info("%s: the same command continues here", path)
                return report
            _run_arm(config, seed, arm, path)
        runs[arm].append(read_run(path))
        write_text(report, comparison(runs, config))
    return report


def _refuse_other_settings(config: LagConfig, path: Path) -> None:
    recorded = flatten(RunDir(path).configs().get("stage1", {}))
    for option, name, now in (
        ("--steps", "steps", config.steps),
        ("--evaluate-every", "evaluate.every_steps", config.evaluate_every),
    ):
        if (there := recorded.get(name)) != now:
            problem = f"{path} was run with {there} (got {now})"
            raise ConfigError(option, problem, f"give another --run-dir, or {option} {there}")


def _run_arm(config: LagConfig, seed: int, arm: tuple[float, int, Correction], path: Path) -> None:
    rate, lag, correction = arm
    start = path.parent / "sft"
    if not start.exists() or RunDir(start).finished_checkpoint("sft") is None:
        run([with_values(at_scale(SFT.paper, "tiny", SFT.tiny), {"seed": seed, "run_dir": str(start)})])
    policy = RunDir(start).finished_checkpoint("sft")
    assert policy is not None, "run() ended without it"
    values = {
        "seed": seed,
        "run_dir": str(path),
        "model": str(policy.path / "model"),
        "steps": config.steps,
        "optimizer.learning_rate": rate * LEARNING_RATE,
        "evaluate.every_steps": config.evaluate_every,
        "checkpoint.every_steps": config.steps,  # an interrupted arm starts again
        "algorithm.min_ess": 0.0,
        **CORRECTIONS[correction],
    }
    log.info("seed %d: rate %g, lag %d, %s", seed, rate, lag, correction)
    if path.exists():  # checkpoints do not contain the lag, so that an interrupted arm cannot resume
        with RunDir(path).held():
            shutil.rmtree(path)
    asked = with_values(at_scale(STAGE_1.paper, "tiny", STAGE_1.tiny), values)
    with lagging(lag):
        try:
            run([asked])
        except NothingLearned as diverged:  # the same seed would repeat it
            log.info("%s: %s", path, diverged)
    write_text(path / "done", "")


def comparison(runs: Mapping[tuple[float, int, Correction], Sequence[RunRecord]], config: LagConfig) -> str:
    """A Markdown table of the arms that have run."""
    steps = range(config.evaluate_every, config.steps + 1, config.evaluate_every)
    rows: list[list[str]] = []
    for (rate, lag, correction), found in runs.items():
        if not found:
            continue
        last = [score(one, config.steps) for one in found]
        base = next((other for arm, other in runs.items() if arm[:2] == (rate, 0)), [])
        paired = [100 * (own - score(of, config.steps)) for own, of in zip(last, base, strict=False)]
        rows.append(
            [
                f"{rate:g}",
                f"{lag}",
                correction if lag else "",
                *(percent(mean(score(one, step) for one in found)) for step in steps),
                cell(paired, "{:+.1f}".format) if paired else "",
                f"{min(min(_column(one, 'ess_tokens'), default=1.0) for one in found):.2f}",
                f"{mean(sum(_column(one, 'step_s')) for one in found):,.0f} s",
            ]
        )
    head = ["rate", "lag", "correction", *(f"step {step}" for step in steps), "against lag 0, points", "least ESS"]
    return f"""# Learning from older weights

{table([*head, "time of all steps"], rows)}

pass@1 on the held-out problems, by the weights that engines served at that step: those of `lag` updates less. Means
over seeds; the difference is paired by seed, with its 95 % interval. A run that stopped counts with its last score.
The time is that of synchronous steps; a run with `--staleness` takes as much less as `python -m benchmarks.asynchrony`
measures.
"""


def score(one: RunRecord, step: int) -> float:
    """The latest score up to this step."""
    known = [row["avg_at_k"] for row in one.heldout if row["rl_step"] <= step]
    return known[-1] if known else 0.0


def _column(one: RunRecord, name: str) -> list[float]:
    return [row[name] for row in one.steps if row.get(name) is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status as for recipes."""

    def act() -> None:
        print(experiment(options_of(LagConfig, argv, description=__doc__)))

    return status_of(act)


if __name__ == "__main__":
    sys.exit(main())
