"""The disk space of a run's checkpoints, shown before it starts; a disk that is too small is refused."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rstar_ray.config import RunConfig
from rstar_ray.errors import ConfigError
from scheduler.planner.checkpoint_cost import plan_checkpoint
from scheduler.planner.model_shape import GB, read_model


def checkpoint_lines(ahead: Sequence[RunConfig], model: Path, run_dir: Path) -> list[str]:
    """What the checkpoints of each stage ahead take, by the shape of the model in `model`.

    Raises `ConfigError` where the disk of the run directory has no room for those that a stage keeps and one more,
    beside what the stages before it leave; empty for a model that cannot be planned, or is not made yet.
    """
    try:
        shape = read_model(model / "config.json")
    except (OSError, ValueError):
        return []
    lines: list[str] = []
    free_gb = shutil.disk_usage(run_dir).free / GB
    for config in ahead:
        best = config.stage != "sft" and config.evaluate.every_steps > 0
        plan = plan_checkpoint(shape, config.learner, config.checkpoint, best=best)
        free_gb += _bytes_of(config.stage, run_dir / "checkpoints") / GB
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
    """Earlier checkpoints of the same stage, which make room for later ones; those of other stages stay."""
    return sum(path.stat().st_size for path in folder.glob(f"{stage}-step-*/**/*") if path.is_file())
