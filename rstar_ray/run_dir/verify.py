"""A run directory looked through: checkpoints by their checksums, stages by their ends, steps by their rows."""

from collections.abc import Callable
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import read_object
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.growing import GrowingRows
from rstar_ray.run_dir.ledger import ledger_faults
from rstar_ray.run_dir.manifest import damage, writers


def faults(path: Path, *, show: Callable[[str], None]) -> list[str]:
    """What is wrong, a line each; `show` gets a line for each thing that was looked at and is whole."""
    run_dir = RunDir(path)
    found: list[str] = []
    for folder in sorted(run_dir.checkpoints_path.glob("*")) if run_dir.checkpoints_path.is_dir() else ():
        if folder.name.startswith("."):
            continue
        wrong = damage(folder)
        if wrong is None:
            wrote = ", ".join(f"{count} of {writer}" for writer, count in sorted(writers(folder).items()))
            show(f"checkpoint {folder.name}: whole; files: {wrote}")
        else:
            found.append(f"checkpoint {folder.name}: {wrong}")
    for marker in sorted((run_dir.path / "finished").glob("*.json")):
        try:
            stage, step = marker.stem, read_object(marker, "step")["step"]
        except ConfigError as unread:
            found.append(f"finished/{marker.name}: {unread.problem}")
            continue
        if step not in [checkpoint.step for checkpoint in run_dir.checkpoints(stage)]:
            found.append(f"{stage} finished at step {step}, but that checkpoint is not there or not whole")
    return found + _steps_missing_or_twice(run_dir, show) + ledger_faults(run_dir.path, show=show)


def _steps_missing_or_twice(run_dir: RunDir, show: Callable[[str], None]) -> list[str]:
    """In metrics.jsonl every stage has each step from 1 on once, at least up to its newest checkpoint."""
    table = GrowingRows(run_dir.path / "metrics.jsonl", "stage", "step")
    table.read()
    by_stage: dict[str, list[int]] = {}
    for row in table.rows:
        by_stage.setdefault(row["stage"], []).append(row["step"])
    found = list(table.faults)
    for stage, steps in by_stage.items():
        newest = run_dir.newest_checkpoint(stage)
        if steps != list(range(1, len(steps) + 1)):
            odd = next(step for position, step in enumerate(steps, start=1) if step != position)
            found.append(f"metrics.jsonl: the steps of {stage} are not 1, 2, 3, ...: {odd} stands out of turn")
        elif newest is not None and newest.step > len(steps):
            found.append(f"metrics.jsonl: {stage} has {len(steps)} steps, and a checkpoint of step {newest.step}")
        else:
            show(f"metrics of {stage}: {len(steps)} steps, each once")
    return found
