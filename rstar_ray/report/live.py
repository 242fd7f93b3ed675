"""Data of an active run for the live page, read as its files grow."""

import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_ray.report.findings import duration
from rstar_ray.report.page import page_data
from rstar_ray.report.run_record import Row, RunFiles, TrajectoryFile, stage_title, trajectory_files
from rstar_ray.report.trajectory_browser import ids_of, ledger_data, new_browser, rule_of, statuses_of
from rstar_ray.report.trajectory_rows import (
    Siblings,
    has_figures,
    read_again,
    shares_of,
    siblings_of,
    statuses_by_step,
    without_texts,
)
from rstar_ray.report.trajectory_text import deflated, figure_block, text_block

TABLES = ("config.json", "metrics.jsonl", "evaluations.jsonl", "launches.jsonl", "ledger.jsonl")


@dataclass(frozen=True, slots=True)
class _Indexed:
    """One file of trajectories, as read at one time."""

    written: tuple[int, int]  # size and time
    groups: list[Siblings]  # without their texts
    figures: list[bool]  # of each group


class LiveRun:
    """The page's current data, and single trajectories on request. Not thread-safe."""

    def __init__(self, path: Path | str) -> None:
        """Raises `ConfigError` where there is no run, or a run of a newer version."""
        self._files = RunFiles(path)
        self._run = self._files.record(begun=True)
        self._ledger: list[Row] = []
        self._indexed: dict[str, _Indexed] = {}
        self._seen: tuple[Any, ...] | None = None
        self.version = 0

    @property
    def name(self) -> str:
        return self._run.name

    def changed(self) -> bool:
        """Whether a file of the run changed since `data` was called."""
        return self._written() != self._seen

    def data(self) -> dict[str, Any]:
        """Everything on the page except texts. Raises as the constructor if the run has disappeared."""
        seen = self._written()
        self._run, self._ledger = self._files.record(begun=True), self._files.ledger()
        data = page_data(self._run) | {
            "browser": self._browser(),
            "ledger": ledger_data(self._run, self._ledger),
            "footer": "Served from the run directory as it grows; report.html there is the same page as one file.",
        }
        self._seen = seen  # only now: after a failure the page is still outdated
        self.version += 1
        return data

    def block(self, kind: str, where: str, place: int) -> bytes | None:
        """A group's texts or token figures by file and index, or a step's rollouts by stage and step."""
        if kind == "ids":
            row = next((row for row in self._ledger if (row["stage"], row["step"]) == (where, place)), None)
            return deflated(ids_of(row)) if row else None
        file = next((file for file in trajectory_files(self._run) if file.path.name == where), None)
        if file is None or where not in self._indexed or not 0 <= place < len(self._indexed[where].groups):
            return None
        group = read_again(file, self._indexed[where].groups[place])
        if kind == "figures":
            return figure_block(group) or None
        known = statuses_of(group, {"set": file.problem_set}, statuses_by_step(self._ledger))
        return text_block(group, known, rule_of(self._run, group.stage))

    def state(self) -> str:
        """The run's state in a few words."""
        rows = self._run.steps or self._run.sft
        running = "active" if self._holder() else "not running"
        metrics = self._files.path / "metrics.jsonl"
        if not rows or not metrics.exists():
            return f"{running}: no step has ended yet"
        ago = duration(max(0.0, time.time() - metrics.stat().st_mtime))
        return f"{running}: {stage_title(rows[-1]['stage'])}, step {rows[-1]['step']}, {ago} ago"

    def _holder(self) -> bool:
        """Whether the process named by the lock file is alive; assumed for a process on another host."""
        try:
            owner = re.match(r"process (\d+) on (.*)", (self._files.path / ".lock").read_text())
        except OSError:
            return False
        if owner is None or owner[2] != socket.gethostname():
            return owner is not None
        return Path(f"/proc/{owner[1]}").exists()

    def _browser(self) -> dict[str, Any]:
        files = trajectory_files(self._run)
        browser, known = new_browser(files), statuses_by_step(self._ledger)
        figures: list[int] = []
        for number, file in enumerate(files):
            indexed = self._index(file, len(files))
            for group, has in zip(indexed.groups, indexed.figures, strict=True):
                added = browser.add(Siblings(number, group.group_id, group.rows, group.starts), known)
                figures += [added] * has
        data = browser.as_json()
        note = f"{len(data['columns']['group']):,} recorded trajectories; each text is fetched when it is looked at."
        return data | {"bodies": list(range(len(data["groups"]))), "figures": figures, "note": note}

    def _index(self, file: TrajectoryFile, num_files: int) -> _Indexed:
        status = file.path.stat()
        written = status.st_size, status.st_mtime_ns
        found = self._indexed.get(file.path.name)
        if found is None or found.written != written:
            groups = siblings_of(file, 0, **shares_of(num_files))
            found = _Indexed(written, [without_texts(group) for group in groups], [has_figures(one) for one in groups])
            self._indexed[file.path.name] = found
        return found

    def _written(self) -> tuple[Any, ...]:
        """Name, size and modification time of every file that the page uses."""
        path = self._files.path
        tables = [path / name for name in TABLES]
        seen: list[tuple[str, int, int]] = []
        for file in [*tables, *(path / "finished").glob("*.json"), *(path / "trajectories").glob("*.jsonl")]:
            with suppress(FileNotFoundError):
                status = file.stat()
                seen.append((str(file), status.st_size, status.st_mtime_ns))
        return tuple(sorted(seen))
