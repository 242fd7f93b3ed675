"""Data of the page's trajectory browser and ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rstar_ray.report.run_record import Row, RunRecord, TrajectoryFile, stage_title, trajectory_files
from rstar_ray.report.trajectory_rows import (
    COLUMNS,
    NOTHING_KNOWN,
    STATUSES,
    LedgerBySteps,
    Siblings,
    StepStatuses,
    Words,
    place_in_step,
    read_siblings,
    row_values,
    statuses_by_step,
)
from rstar_ray.report.trajectory_text import Body, deflated, figure_block, text_block
from rstar_ray.run_dir.ledger import RolloutStatus

MOST_LOST = 2_000
"""Largest number of dropped and left-out rollouts listed with their reasons; the newest are listed."""
MOST_LEDGER_BYTES = 2**20
"""Size limit of the compressed rollout ids of the ledger; the newest steps are included."""


@dataclass(slots=True)
class Browser:
    """Rows by column, the lists that they index, and bodies; filled group by group."""

    files: list[dict[str, Any]]
    groups: list[list[Any]] = field(default_factory=list[list[Any]])  # id, file, problem, place in file
    problems: list[list[Any]] = field(default_factory=list[list[Any]])  # id, text, truth, family, difficulty
    values: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    words: Words = field(default_factory=Words)
    problem_numbers: dict[tuple[str, ...], int] = field(default_factory=dict[tuple[str, ...], int])
    groups_in_file: dict[int, int] = field(default_factory=dict[int, int])
    rows_in_file: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, siblings: Siblings, known: LedgerBySteps) -> int:
        """Returns the group's number."""
        first = siblings.rows[0]
        number, place = len(self.groups), self.groups_in_file.get(siblings.file, 0)
        self.groups_in_file[siblings.file] = place + 1
        self.groups.append([_short_id(siblings.group_id, first), siblings.file, self._problem(first), place])
        statuses = statuses_of(siblings, self.files[siblings.file], known)
        for place, row in enumerate(siblings.rows):
            last = row["rollout_id"].rpartition("/")[2]  # its number in the group: a dropped rollout has no row
            sibling = int(last) if last.isdecimal() else place
            self.values.append(row_values(row, sibling, number, statuses, self.words))
        self.rows_in_file[siblings.file] = self.rows_in_file.get(siblings.file, 0) + len(siblings.rows)
        return number

    def _problem(self, row: Row) -> int:
        key = (row["problem_id"], row["problem"], row["answer"])  # ids are unique within a file only
        number = self.problem_numbers.setdefault(key, len(self.problems))
        if number == len(self.problems):
            shown = [row["problem_id"], row["problem"], row["answer"], row["family"], row["difficulty"]]
            self.problems.append(shown)
        return number

    def as_json(self) -> dict[str, Any]:
        """Columns, and the lists that they index."""
        columns = dict(zip(COLUMNS, map(list, zip(*self.values, strict=True)), strict=True)) if self.values else {}
        shown = [file | {"rows": self.rows_in_file.get(number, 0)} for number, file in enumerate(self.files)]
        return {
            "columns": columns or {name: [] for name in COLUMNS},
            "files": shown,
            "groups": self.groups,
            "problems": self.problems,
            "stops": self.words.stops,
            "outcomes": self.words.outcomes,
            "statuses": list(STATUSES),
        }


def new_browser(files: Sequence[TrajectoryFile]) -> Browser:
    """An empty browser for these files."""
    return Browser([file_facts(file) for file in files])


def file_facts(file: TrajectoryFile) -> dict[str, Any]:
    return {
        "name": file.path.name,
        "title": file.title,
        "stage": file.stage,
        "step": file.step,
        "set": file.problem_set,
        "rl_step": file.rl_step,
    }


def _short_id(group_id: str, row: Row) -> str:
    return place_in_step({**row, "rollout_id": group_id})


def read_browser(run: RunRecord, ledger: Sequence[Row]) -> tuple[Browser, list[Body]]:
    """Rows and bodies of the recorded trajectories, within the limits of `read_siblings`."""
    browser, known, bodies = new_browser(trajectory_files(run)), statuses_by_step(ledger), list[Body]()
    for siblings in read_siblings(run):
        number = browser.add(siblings, known)
        file, place, rule = browser.files[siblings.file], browser.groups[number][3], rule_of(run, siblings.stage)
        texts = text_block(siblings, statuses_of(siblings, file, known), rule)
        bodies.append(Body(number, siblings.file, file["name"], place, texts, figure_block(siblings)))
    return browser, bodies


def statuses_of(siblings: Siblings, file: Mapping[str, Any], known: LedgerBySteps) -> StepStatuses:
    """The ledger's statuses of a training step; an evaluation has none."""
    return NOTHING_KNOWN if file["set"] else known.get((siblings.stage, siblings.step), NOTHING_KNOWN)


def rule_of(run: RunRecord, stage: str) -> str:
    """The resampling rule of a stage, and the parts of the penalty that it leaves out."""
    algorithm = run.config.get(stage, {}).get("algorithm", {})
    parts = {"p_err": "roc_error_ratio", "p_format": "roc_answer_format"}
    off = [part for part, option in parts.items() if not algorithm.get(option, True)]
    return str(algorithm.get("resample", "paper")) + (f" without {' and '.join(off)}" if off else "")


def ledger_data(run: RunRecord, ledger: Sequence[Row]) -> dict[str, Any]:
    """Counts by step, and every rollout that was dropped or left out, with its reason."""
    starts = {span.name: span.start for span in run.spans}
    lost = [
        [row["stage"], row["step"], rollout_id, status, row["reasons"].get(rollout_id, "")]
        for row in reversed(ledger)
        for status in (RolloutStatus.DROPPED, RolloutStatus.LEFT_OUT)
        for rollout_id in row["ids"][status]
    ]
    return {
        "statuses": list(RolloutStatus),
        "steps": [
            [row["stage"], row["step"], starts.get(row["stage"], 0) + row["step"], row["rollouts"]]
            + [row.get(status, 0) for status in RolloutStatus]
            for row in ledger
        ],
        "stages": {stage: stage_title(stage) for stage in {row["stage"] for row in ledger}},
        "lost": lost[:MOST_LOST],
        "num_lost": len(lost),
    }


def ledger_ids(ledger: Sequence[Row]) -> dict[str, bytes]:
    """The rollouts behind each step's counts, deflated, by `<stage>/<step>`; the newest steps that fit."""
    blocks: dict[str, bytes] = {}
    size = 0
    for row in reversed(ledger):
        data = deflated(ids_of(row))
        size += len(data)
        if size > MOST_LEDGER_BYTES:
            break
        blocks[f"{row['stage']}/{row['step']}"] = data
    return blocks


def ids_of(row: Row) -> dict[str, dict[str, int]]:
    """Status number of each sibling, by group: `{"3-gcd-17": {"0": 0, "1": 2}}`."""
    groups: dict[str, dict[str, int]] = {}
    for number, status in enumerate(RolloutStatus):
        for rollout_id in row["ids"].get(status, ()):
            group, _, sibling = rollout_id.rpartition("/")
            groups.setdefault(group, {})[sibling] = number
    return groups
