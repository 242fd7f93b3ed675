"""Checks the disk space for a run's checkpoints before it starts."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rstar_ray.config import RunConfig
from rstar_ray.errors import ConfigError
from scheduler.planner.checkpoint_cost import plan_checkpoint
from scheduler.planner.model_shape import GB, read_model


def checkpoint_lines(ahead: Sequence[RunConfig], model: Path, run_dir: Path) -> list[str]:
    """One line per stage with the size of its checkpoints, estimated from the shape of the model in `model`.

    Empty if the model cannot be planned or does not exist yet. Raises `ConfigError` if the run directory's disk has no
    room for the checkpoints that a stage keeps and one being written, in addition to those of earlier stages.
    """
    try:
        shape = read_model(model / "config.json")
    except (OSError, ValueError):
        return []
    lines: list[str] = []
    checkpoints = run_dir / "checkpoints"  # possibly a link to another disk
    free_gb = shutil.disk_usage(checkpoints if checkpoints.exists() else run_dir).free / GB
    for config in ahead:
        best = config.stage != "sft" and config.evaluate.every_steps > 0
        plan = plan_checkpoint(shape, config.learner, config.checkpoint, best=best)
        free_gb += _bytes_of(config.stage, checkpoints) / GB
        if free_gb < plan.on_disk_gb:
            raise ConfigError(
                "--run-dir",
                f"{run_dir} has room for {free_gb:,.1f} GB of checkpoints of {config.stage}, and --checkpoint.keep "
                f"{plan.keep}{', the best one' if best else ''} and one being written take {plan.on_disk_gb:,.1f} GB",
                "name a directory on a larger disk, or keep fewer",
            )
        lines.append(f"{config.stage}: {plan.summary()}; {free_gb:,.0f} GB are free for them")
        free_gb -= plan.left_gb(config.sft.steps if config.stage == "sft" else config.steps)
    return lines


def _bytes_of(stage: str, folder: Path) -> int:
    """Bytes of this stage's existing checkpoints, which later ones replace."""
    return sum(path.stat().st_size for path in folder.glob(f"{stage}-step-*/**/*") if path.is_file())
