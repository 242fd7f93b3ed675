"""The weights after each step of a stage, in the journal: `weights.jsonl`, one row per completed step.

Rollouts that continue under newer weights have tokens of several versions. A resumed run keeps a turn if it knows the
checksum of every version that sampled it, and repeats as many steps as are recorded here, without the rollouts that
were dropped from them.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import append_row, cut_rows, read_rows

log = logging.getLogger(__name__)

WEIGHTS = "weights.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """The weights that are served after a step."""

    stage: str
    step: int
    version: int
    checksum: int
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])  # reasons by rollout id


class WeightsRecord:
    """The rows of one stage."""

    def __init__(self, journal: Path, stage: str) -> None:
        """Empty where the file cannot be read; a damaged one is moved aside."""
        self._journal = journal
        self._stage = stage
        rows, path = list[StepWeights](), journal / WEIGHTS
        try:
            rows = _rows(journal)
        except (ConfigError, TypeError) as damaged:
            log.warning(f"{path.name}: turns of several versions are sampled again ({damaged})")
            if not isinstance(damaged.__cause__, OSError):
                with best_effort(WEIGHTS):
                    path.replace(path.with_suffix(".damaged"))  # rows that are appended now can be read later
        self._rows = {row.step: row for row in rows if row.stage == stage}

    @property
    def last_step(self) -> int:
        """The last step that any launch of the run completed; 0 where no step is recorded."""
        return max(self._rows, default=0)

    def version(self, step: int) -> int | None:
        """Version after this step; None where the step is not recorded."""
        row = self._rows.get(step)
        return row.version if row else None

    def dropped(self, step: int) -> Mapping[str, str]:
        """Reasons by id of the rollouts that this step was trained without; empty where the step is not recorded."""
        row = self._rows.get(step)
        return row.dropped if row else {}

    def note(self, step: int, version: int, checksum: int, dropped: Mapping[str, str] | None = None) -> None:
        """Record a completed step; `dropped`: as `dropped` returns them.

        If it differs from an earlier record, rows from this step on are removed.
        """
        row = StepWeights(stage=self._stage, step=step, version=version, checksum=checksum, dropped=dict(dropped or {}))
        if self._rows.get(step) == row:
            return
        path = self._journal / WEIGHTS
        self._journal.mkdir(parents=True, exist_ok=True)
        if self.last_step >= step:
            cut_rows(path, stage=self._stage, after_step=step - 1)
            self._rows = {number: other for number, other in self._rows.items() if number < step}
        self._rows[step] = row
        append_row(path, asdict(row), sync=True)  # a row that is lost costs the rollouts of its step


def read_weights(journal: Path) -> list[StepWeights]:
    """All rows; empty where the file does not exist or is damaged."""
    try:
        return _rows(journal)
    except (ConfigError, TypeError):
        return []


def _rows(journal: Path) -> list[StepWeights]:
    return [StepWeights(**row) for row in read_rows(journal / WEIGHTS)]
