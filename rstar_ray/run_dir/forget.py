"""Deletion of a stage's files and rows in a run directory, so that the stage can start again with other settings."""

import logging
from pathlib import Path

from rstar_ray.agent.journal import choice_folder, evaluation_folder
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import cut_rows, read_rows, remove_folder, write_json
from rstar_ray.run_dir.folder import QUARANTINED, RunDir
from rstar_ray.stages import STAGES

log = logging.getLogger(__name__)

TABLES = ("metrics.jsonl", "ledger.jsonl", "evaluations.jsonl", "journal/weights.jsonl")
"""Tables with rows per step."""


def forget(path: Path, stage: str, *, sure: bool) -> None:
    """Remove the stage's files and rows, and log each of them; unless `sure`, only log them.

    A second call after a crash removes the rest. Raises `ConfigError` where the directory is in use or has no such
    stage, and where a later stage has started from this one's checkpoint.
    """
    run_dir = RunDir(path)
    with run_dir.held():
        settings = run_dir.configs()
        if stage not in settings:
            raise ConfigError(
                "--stage", f"{run_dir.path} has no {stage}", f"give one of {', '.join(settings) or 'none'}"
            )
        after = [later for later in _after(stage) if not settings.get(later, {}).get("model")]
        begun = next((later for later in after if _begun(run_dir, later)), None)
        if begun is not None:
            hint = f"forget {begun} first, or name a new directory for {stage}"
            raise ConfigError("--stage", f"{begun} of {run_dir.path} started from the checkpoint of {stage}", hint)
        leavings = left_by(run_dir, stage, last=[*settings] == [stage])
        rows = {name: count for name in TABLES if (count := _rows_of(run_dir.path / name, stage))}
        word = "removed" if sure else "would remove"
        for one in leavings:
            if sure:
                if one.is_dir():
                    remove_folder(one)
                else:
                    one.unlink()
            log.info(f"{word} {one.relative_to(run_dir.path)}")
        for name, count in rows.items():
            if sure:
                cut_rows(run_dir.path / name, stage=stage, after_step=-1)
            log.info(f"{word} {count} rows of {name}")
        if sure:  # last, so that after a crash the stage is still known and can be removed again
            write_json(run_dir.config_path, {name: of for name, of in settings.items() if name != stage})
        log.info(f"{word} {stage} from {run_dir.config_path.name}")


def left_by(run_dir: RunDir, stage: str, *, last: bool) -> list[Path]:
    """The stage's files and folders. The end marker comes first, since a marker without its checkpoint is a fault.

    With `last`, the directory's only stage, they include the start model made by its seed and the samples of unfinished
    evaluations.
    """
    step = f"{stage}-step-*"
    found = [
        (run_dir.path / "finished", f"{stage}.json"),
        *((run_dir.checkpoints_path, pattern) for pattern in (f".tmp-*{step}", step, f"{QUARANTINED}{step}")),
        *((run_dir.journal_path, pattern) for pattern in (step, choice_folder(stage), evaluation_folder(stage))),
        (run_dir.path, f"{stage}-problems.json"),
        *((run_dir.results_path, pattern) for pattern in (step, f"{stage}-filter-*")),
        (run_dir.trajectories_path, f"{stage}-*.jsonl"),
        (run_dir.path, f"{stage}.toml"),
        (run_dir.path / "plots", f"step-{stage}.png"),
        (run_dir.path / "tensorboard", stage),
        (run_dir.path / "export", step),
        *([(run_dir.path, "start-model"), (run_dir.journal_path, "evaluate-*")] if last else []),
    ]
    return [path for folder, pattern in found for path in sorted(folder.glob(pattern))]


def _after(stage: str) -> tuple[str, ...]:
    return STAGES[STAGES.index(stage) + 1 :] if stage in STAGES else ()


def _begun(run_dir: RunDir, stage: str) -> bool:
    """Whether the stage has checkpoints or rows. An entry in config.json is not enough: a command of several stages
    claims the directory for all of them."""
    checkpoints = run_dir.checkpoints_path.glob(f"*{stage}-step-*")
    return any(checkpoints) or any(_rows_of(run_dir.path / name, stage) for name in TABLES)


def _rows_of(path: Path, stage: str) -> int:
    return sum(row.get("stage") == stage for row in read_rows(path))
