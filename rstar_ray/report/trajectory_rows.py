"""The trajectory browser's rows: recorded trajectories by group of siblings, with the status of each and its reason.

What is read is bounded, so that a page of any run is written in seconds: `MOST_ROWS` trajectories and `MOST_BYTES` of
their files, in equal shares for every file, whole groups from the top of each.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rstar_ray.algorithm.resample import error_penalty, format_penalty
from rstar_ray.report.run_record import TRAJECTORY, Row, RunRecord, TrajectoryFile, trajectory_files
from rstar_ray.report.segments import recovered
from rstar_ray.run_dir.ledger import RolloutStatus

MOST_ROWS = 20_000
MOST_BYTES = 768 * 2**20
STATUSES = ("", *RolloutStatus)
"""Statuses by their number in a row; an evaluation's rollouts have no status."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """The recorded rollouts of one prompt in one file."""

    file: int  # its place among the run's trajectory files
    group_id: str
    rows: list[Row]  # one at least
    starts: list[int]  # where each row begins in its file

    @property
    def stage(self) -> str:
        return self.rows[0]["stage"]

    @property
    def step(self) -> int:
        return self.rows[0]["step"]


@dataclass(frozen=True, slots=True)
class StepStatuses:
    """The ledger's data on one step's rollouts, by rollout id without stage and step."""

    statuses: Mapping[str, str]
    advantages: Mapping[str, float]
    reasons: Mapping[str, str]

    @staticmethod
    def of(row: Row) -> "StepStatuses":
        statuses = {rollout_id: status for status, ids in row["ids"].items() for rollout_id in ids}
        return StepStatuses(statuses, row["advantages"], row["reasons"])


NOTHING_KNOWN = StepStatuses({}, {}, {})
LedgerBySteps = Mapping[tuple[str, int], StepStatuses]


def statuses_by_step(ledger: Sequence[Row]) -> dict[tuple[str, int], StepStatuses]:
    """The ledger's entries by stage and step."""
    return {(row["stage"], row["step"]): StepStatuses.of(row) for row in ledger}


def siblings_of(file: TrajectoryFile, number: int, *, most_rows: int, most_bytes: int) -> list[Siblings]:
    """Whole groups from the top of a file; the group at which a limit is reached is excluded unless it is the first."""
    groups: dict[str, Siblings] = {}
    for rows, (row, start, end) in enumerate(_rows(file), start=1):
        group_id = row["group_id"]
        group = groups.setdefault(group_id, Siblings(number, group_id, [], []))
        group.rows.append(row)
        group.starts.append(start)
        if rows > most_rows or end > most_bytes:
            if len(groups) > 1:
                groups.pop(group_id)
            break
    return list(groups.values())


def read_siblings(run: RunRecord) -> Iterator[Siblings]:
    """Groups of every trajectory file, oldest first."""
    files = trajectory_files(run)
    for number, file in enumerate(files):
        yield from siblings_of(file, number, **shares_of(len(files)))


def shares_of(num_files: int) -> dict[str, int]:
    """The limits for one file."""
    return {"most_rows": max(16, MOST_ROWS // num_files), "most_bytes": MOST_BYTES // num_files}


def read_again(file: TrajectoryFile, group: Siblings) -> Siblings:
    """The same group with its full rows, as in the file."""
    rows: list[Row] = []
    with file.path.open("rb") as lines:
        for start in group.starts:
            lines.seek(start)
            rows.append(json.loads(lines.readline()))
    return replace(group, rows=rows)


def without_texts(group: Siblings) -> Siblings:
    """Only the fields that the browser's rows need."""
    heavy = ("prompt", "prompt_ids", "turns")
    return replace(group, rows=[
        {name: value for name, value in row.items() if name not in heavy}
        | {"turns": [{name: turn[name] for name in ("outcomes", "generate_s", "tool_s")} for turn in row["turns"]]}
        for row in group.rows
    ])  # fmt: skip


def has_figures(group: Siblings) -> bool:
    """Whether its records have data for every token."""
    return any(turn["token_chars"] for row in group.rows for turn in row["turns"])


def _rows(file: TrajectoryFile) -> Iterator[tuple[Row, int, int]]:
    """Complete rows with their start and end in bytes; a torn line ends the file, an invalid one is skipped."""
    position = 0
    with file.path.open("rb") as lines:
        for line in lines:
            start, position = position, position + len(line)
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.keys() >= set(TRAJECTORY):
                yield row, start, position


def place_in_step(row: Row) -> str:
    """The rollout's id as in the ledger."""
    return row["rollout_id"].removeprefix(f"{row['stage']}/{row['step']}/")


def reason(row: Row, group: Sequence[Row], known: StepStatuses, rule: str) -> str:
    """One sentence: whether the rollout was kept, of how many, and by which rule."""
    place = place_in_step(row)
    status = known.statuses.get(place)
    if status is None:
        return ""
    if place in known.reasons:
        return f"{'Dropped' if status == RolloutStatus.DROPPED else 'Left out by the learner'}: {known.reasons[place]}."
    right = row["reward"] > 0
    side = [other for other in group if (other["reward"] > 0) == right]
    kept = [
        other for other in side if known.statuses.get(place_in_step(other)) not in (RolloutStatus.RESAMPLED_AWAY, None)
    ]
    drawn = f"{len(kept)} of the group's {len(side)} {'right' if right else 'wrong'} answers"
    sentence = {
        RolloutStatus.RESAMPLED_AWAY: f"Resampled away: not among {drawn} that were kept",
        RolloutStatus.EQUAL_REWARDS: f"Kept among {drawn}, but all kept siblings have the same reward: no signal",
        RolloutStatus.TRAINED: f"Trained on: among {drawn} that were kept",
    }[RolloutStatus(status)]
    if status == RolloutStatus.EQUAL_REWARDS or rule == "none":
        return f"{sentence}."
    if rule not in ("paper", "release", "random"):
        return f"{sentence}, by {rule}."
    graded = right and len({other["reward"] for other in side}) > 1
    return f"{sentence}. {_rule(row, rule, right=right, graded=graded)}"


def _rule(row: Row, rule: str, *, right: bool, graded: bool) -> str:
    if rule == "random" or (not right and rule == "paper"):
        return f"{'All' if rule == 'random' else 'Wrong answers'} are drawn uniformly."
    if not right:
        return "Of the wrong answers the released rule keeps the first."
    # The penalty by which resampling weights a correct answer (arXiv:2508.20722 Eq. 4 and 5).
    of_errors = error_penalty(row["num_calls"], row["num_failed"])
    of_format = format_penalty(row["num_answers"], max(1, len(row["turns"])))
    calls = f"{row['num_failed']} of {row['num_calls']} calls failed" if row["num_calls"] else "no call"
    weighed = f"p_total = p_err {of_errors:.2f} ({calls}) + p_format {of_format:.2f} = {of_errors + of_format:.2f}"
    how = "drawn by 1 / p_total, flawless ones first" if rule == "paper" else "the lowest p_total first"
    among = f", among those with reward {row['reward']:g}, which keep their share" if graded else ""
    return f"Right answers: {how}{among}; here {weighed}."


COLUMNS = (
    "group", "sibling", "reward", "tokens", "turns", "calls", "failed", "stop", "status", "advantage", "recovered",
    "outcomes", "generate_s", "tool_s",
)  # fmt: skip
"""Columns of a row; `stop` and `status` are indices, and `outcomes` bits, into lists in the page."""


def row_values(row: Row, sibling: int, group: int, known: StepStatuses, words: "Words") -> tuple[Any, ...]:
    """One value for each of `COLUMNS`."""
    place = place_in_step(row)
    return (
        group,
        sibling,
        round(row["reward"], 3),
        row["num_response_tokens"],
        len(row["turns"]),
        row["num_calls"],
        row["num_failed"],
        words.stop(row["stop_reason"]),
        STATUSES.index(known.statuses.get(place, "")),
        known.advantages.get(place),
        int(recovered(row)),
        words.outcome_bits({outcome for turn in row["turns"] for outcome in turn["outcomes"]}),
        round(sum(turn["generate_s"] for turn in row["turns"]), 2),
        round(sum(turn["tool_s"] for turn in row["turns"]), 2),
    )


class Words:
    """Repeated strings, each stored once."""

    def __init__(self) -> None:
        self.stops: list[str] = []
        self.outcomes: list[str] = []

    def stop(self, reason: str) -> int:
        return _number_of(reason, self.stops)

    def outcome_bits(self, outcomes: set[str]) -> int:
        """A bit for each outcome that a call of the trajectory had."""
        return sum(1 << _number_of(outcome, self.outcomes) for outcome in sorted(outcomes))


def _number_of(word: str, words: list[str]) -> int:
    if word not in words:
        words.append(word)
    return words.index(word)
