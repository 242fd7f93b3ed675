"""Repeat a step's update from its recorded trajectories and the checkpoint before it, and show differences.

python recipes/replay.py runs/tiny --step 1
python recipes/replay.py runs/tiny --step 31 --stage stage1
python recipes/replay.py runs/tiny --step 31 --export step.safetensors

Steps are recorded every --checkpoint.trajectories-every-steps from the first on (1, 11, 21, ... by default), so that a
checkpoint lies before each that is a multiple of --checkpoint.every-steps and is still kept. Without --step the steps
that can be repeated are listed. Exit status: 0 repeated, 1 something differs, 2 refused.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from actors.launch.changed_settings import changed_rules
from actors.launch.exit_status import status_of
from actors.launch.ray_connection import connect
from actors.launch.start_model import start_model
from actors.preflight.required_paths import with_absolute_paths
from rstar_ray.config.options import options_of
from rstar_ray.errors import ConfigError
from rstar_ray.replay_update import (
    Compared,
    RecordedStep,
    export_step,
    recorded_step,
    repeat_update,
    repeatable,
    rows_of,
)
from rstar_ray.run_dir.folder import RunDir


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""
    step: int = 0
    """of the stage, from 1; without it those that can be repeated are listed"""
    stage: str = ""
    """without it the newest that has this step recorded"""
    export: Path | None = None
    """write the step's rows (token ids, mask, log-probs, advantages) to this safetensors file and do not repeat it"""
    own_folder: str = ""
    """folder of the run's own rules; without it as the run recorded it, relative to the current folder"""


def main(argv: Sequence[str] | None = None) -> int:
    def act() -> int:
        asked = options_of(ReplayOptions, argv, description=__doc__)
        return replay(asked.run.expanduser().absolute(), asked.stage, asked.step, asked.export, asked.own_folder)

    return status_of(act)


def replay(run: Path, stage: str, step: int, export: Path | None = None, own_folder: str = "") -> int:
    """Repeat or export a step, or list those that can be; the exit status."""
    steps = repeatable(run)
    if not step:
        if export is not None:
            raise ConfigError("--export", "no step is named", "give --step")
        return _list(run, [named for named in steps if stage in ("", named[0])], stage or "a stage")
    stage = stage or next((name for name, recorded in reversed(steps) if recorded == step), "stage1")
    recorded = recorded_step(run, stage, step)
    if own_folder:
        recorded = replace(recorded, config=replace(recorded.config, own_folder=own_folder))
    for line in changed_rules(RunDir(run), recorded.config):
        print(line, flush=True)
    if export is not None:
        num_rows = export_step(recorded, export.expanduser())
        print(f"{stage} step {step}: {num_rows} rows written to {export}")
        return 0
    rows = rows_of(recorded)
    print(f"{stage} step {step}: {len(rows)} of {len(recorded.trajectories)} rollouts, as then", flush=True)
    return tell(asyncio.run(_repeat(recorded, run)))


def _list(run: Path, steps: Sequence[tuple[str, int]], of: str) -> int:
    for stage, step in steps:
        print(f"{stage} step {step}")
    if not steps:
        hint = "--checkpoint.trajectories-every-steps and --checkpoint.keep decide what is kept"
        raise ConfigError("RUN", f"{run} has no step of {of} with its trajectories and the checkpoint before it", hint)
    return 0


def tell(figures: Sequence[Compared]) -> int:
    """The figures for a person; the exit status."""
    for figure in figures:
        print(figure.line())
    differs = [figure.name for figure in figures if not figure.alike]
    print(f"differs: {', '.join(differs)}" if differs else "the update is repeated")
    return 1 if differs else 0


async def _repeat(recorded: RecordedStep, run: Path) -> list[Compared]:
    from actors.learner.gang import Learner

    connect()
    config = with_absolute_paths(recorded.config)
    share = {"num_cpus": config.learner.cpus_per_rank, "num_gpus": config.learner.gpus_per_rank}
    model = start_model(config, run, recorded.before)
    learner = Learner(config, model, rank_options=[share] * config.learner.ranks)
    try:
        await learner.start()
        return await repeat_update(recorded, learner)
    finally:
        await learner.close()


if __name__ == "__main__":
    sys.exit(main())
