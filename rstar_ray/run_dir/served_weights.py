"""The weights that each step of a stage left, in the journal: `weights.jsonl`, a row for each step that has ended.

Rollouts under newer weights have tokens of several versions. A resumed run keeps a turn where it knows the
checksum of every version that sampled it, and repeats as many steps as are on record here.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import append_row, cut_rows, read_rows

WEIGHTS = "weights.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """The weights that serve once a step has ended."""

    stage: str
    step: int
    version: int
    checksum: int


class WeightsRecord:
    """The rows of one stage."""

    def __init__(self, journal: Path, stage: str) -> None:
        """Without a row where the file cannot be read: turns of several versions are then sampled again."""
        self._journal = journal
        self._stage = stage
        self._rows = {row.step: row for row in read_weights(journal) if row.stage == stage}

    @property
    def last_step(self) -> int:
        """The last that has ended in any start of the run; 0 where none is on record."""
        return max(self._rows, default=0)

    def version(self, step: int) -> int | None:
        """After this step; None where it is not on record."""
        row = self._rows.get(step)
        return row.version if row else None

    def note(self, step: int, version: int, checksum: int) -> None:
        """The step has ended. Rows of it and later steps that led to other weights are removed."""
        row = StepWeights(stage=self._stage, step=step, version=version, checksum=checksum)
        if self._rows.get(step) == row:
            return
        path = self._journal / WEIGHTS
        self._journal.mkdir(parents=True, exist_ok=True)
        if self.last_step >= step:
            cut_rows(path, stage=self._stage, after_step=step - 1)
            self._rows = {number: other for number, other in self._rows.items() if number < step}
        self._rows[step] = row
        append_row(path, asdict(row))


def read_weights(journal: Path) -> list[StepWeights]:
    """All rows; none where the file is not there or is damaged."""
    try:
        return [StepWeights(**row) for row in read_rows(journal / WEIGHTS)]
    except (ConfigError, TypeError):
        return []
