"""A run's checkpoints before it starts: what they take is shown, and a disk that is too small for them refused."""

import shutil
from pathlib import Path

from rstar_ray.config import RunConfig
from rstar_ray.errors import ConfigError
from scheduler.checkpoints import plan_checkpoint
from scheduler.plan import GB, read_model


def checkpoint_line(config: RunConfig, model: Path, run_dir: Path) -> str:
    """What the checkpoints of a stage take, by the shape of the model in `model`.

    Raises `ConfigError` where the disk of the run directory has no room for those kept and one more; empty for a model
    that cannot be planned, or is not made yet.
    """
    try:
        shape = read_model(model / "config.json")
    except (OSError, ValueError):
        return ""
    learner = config.learner
    plan = plan_checkpoint(
        shape,
        ranks=learner.ranks,
        dtype=learner.dtype,
        every_steps=config.checkpoint.every_steps,
        keep=config.checkpoint.keep,
        lora_rank=learner.lora_rank,
    )
    free_gb = (shutil.disk_usage(run_dir).free + _bytes_below(run_dir / "checkpoints")) / GB
    if free_gb < plan.on_disk_gb:
        raise ConfigError(
            "--run-dir",
            f"{run_dir} has room for {free_gb:,.1f} GB of checkpoints, and --checkpoint.keep {plan.keep} and one being "
            f"written take {plan.on_disk_gb:,.1f} GB",
            "name a directory on a larger disk, or keep fewer",
        )
    return f"{config.stage}: {plan.told()}; {free_gb:,.0f} GB are free"


def _bytes_below(folder: Path) -> int:
    """Of earlier checkpoints, which make room for later ones."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
