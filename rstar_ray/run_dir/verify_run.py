"""Checks of a run directory: checksums of checkpoints, ends of stages, and a row for each step."""

import logging
from collections.abc import Mapping
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import read_object
from rstar_ray.run_dir.folder import QUARANTINED, RunDir
from rstar_ray.run_dir.ledger import ledger_faults
from rstar_ray.run_dir.manifest import Unreadable, damage, writers
from rstar_ray.run_dir.tail import GrowingRows

log = logging.getLogger(__name__)

Steps = dict[str, list[int]]
"""By stage."""
WITHOUT_ROLLOUTS = "sft"
"""The stage whose steps have no row in the ledger."""


def faults(path: Path) -> list[str]:
    """One line per fault. Undamaged checkpoints and complete tables are logged."""
    run_dir = RunDir(path)
    whole, of_checkpoints = _checkpoints(run_dir)
    ended, of_ends = _ends(run_dir, whole)
    reached = {stage: max(whole.get(stage, []) + ended.get(stage, [])) for stage in whole | ended}
    logged, of_metrics = _metrics(run_dir, reached)
    # A step's row of the ledger is written after its row of metrics: a run that was killed lacks at most the newest.
    rolled_out = {
        stage: max(reached.get(stage, 0), len(logged.get(stage, [])) - 1)
        for stage in reached | logged
        if stage != WITHOUT_ROLLOUTS
    }
    of_ledger = ledger_faults(run_dir.path, reached=rolled_out)
    return of_checkpoints + of_ends + of_metrics + of_ledger


def _checkpoints(run_dir: RunDir) -> tuple[Steps, list[str]]:
    """Steps of the undamaged checkpoints, and the faults of the others."""
    whole, found = Steps(), list[str]()
    for folder in sorted(run_dir.checkpoints_path.glob("*")) if run_dir.checkpoints_path.is_dir() else ():
        if folder.name.startswith("."):
            continue
        try:
            wrong = damage(folder)
        except Unreadable as unread:
            wrong = str(unread)
        if wrong is None:
            wrote = ", ".join(f"{count} of {writer}" for writer, count in sorted(writers(folder).items()))
            log.info(f"checkpoint {folder.name}: undamaged; files: {wrote}")
            stage, _, step = folder.name.rpartition("-step-")
            if step.isdecimal() and not stage.startswith(QUARANTINED):
                whole.setdefault(stage, []).append(int(step))
        else:
            found.append(f"checkpoint {folder.name}: {wrong}")
    return whole, found


def _ends(run_dir: RunDir, whole: Steps) -> tuple[Steps, list[str]]:
    """The step at which each finished stage ended, and faults of these ends."""
    ended, found = Steps(), list[str]()
    for marker in sorted((run_dir.path / "finished").glob("*.json")):
        try:
            stage, step = marker.stem, read_object(marker, "step")["step"]
        except ConfigError as unread:
            found.append(f"finished/{marker.name}: {unread.problem}")
            continue
        if isinstance(step, int):
            ended[stage] = [step]
        if step not in whole.get(stage, []):
            found.append(f"{stage} finished at step {step}, but that checkpoint is missing or damaged")
    return ended, found


def _metrics(run_dir: RunDir, reached: Mapping[str, int]) -> tuple[Steps, list[str]]:
    """Check that metrics.jsonl has each step of a stage once, from 1 to at least the step that it has `reached`.

    Returns the steps by stage, and faults.
    """
    table = GrowingRows(run_dir.path / "metrics.jsonl", "stage", "step")
    table.read()
    logged: Steps = {stage: [] for stage, step in reached.items() if step > 0}
    for row in table.rows:
        logged.setdefault(row["stage"], []).append(row["step"])
    found = list(table.faults)
    for stage, steps in logged.items():
        if steps != list(range(1, len(steps) + 1)):
            odd = next(step for position, step in enumerate(steps, start=1) if step != position)
            found.append(f"metrics.jsonl: the steps of {stage} are not 1, 2, 3, ...: {odd} is out of order")
        elif reached.get(stage, 0) > len(steps):
            found.append(f"metrics.jsonl: {stage} has {len(steps)} steps, but completed {reached[stage]}")
        else:
            log.info(f"metrics of {stage}: {len(steps)} steps, each once")
    return logged, found
