"""The results of one problem's k rollouts: a row of jsonl, written when the last rollout ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rstar_ray.config.own_code import READ_LOOSELY
from rstar_ray.evaluation.request_digest import digest_of
from rstar_ray.run_dir.durable import read_rows, remove_torn_row, to_row
from rstar_ray.run_dir.metrics import is_correct
from rstar_ray.trajectory import Problem, StopReason, TrajectorySummary


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """One problem's rollouts, in the order of their siblings. Legend: k rollouts."""

    problem_id: str
    family: str
    difficulty: float
    correct: tuple[bool, ...]  # [k]
    answers: tuple[str, ...]  # [k] as they were written; empty where there was none
    response_tokens: tuple[int, ...]  # [k]
    calls: tuple[int, ...]  # [k]
    failed: tuple[int, ...]  # [k] calls
    first_failed: tuple[bool, ...]  # [k] the first call did
    turns: tuple[int, ...]  # [k]
    stop_reasons: tuple[StopReason, ...]  # [k]
    unjudged: tuple[str, ...]  # [k] why the answer could not be judged, and counts as not right; empty where it was
    loosely_correct: tuple[bool, ...] = ()  # [k] taken loosely; empty where the problem names no such rule

    @property
    def k(self) -> int:
        return len(self.correct)

    @property
    def num_correct(self) -> int:
        return sum(self.correct)

    @classmethod
    def of(cls, problem: Problem, summaries: Sequence[TrajectorySummary]) -> "ProblemResult":
        """From all of a problem's rollouts."""
        return cls(
            problem_id=problem.id,
            family=problem.family,
            difficulty=problem.difficulty,
            correct=tuple(map(is_correct, summaries)),
            answers=tuple(summary.answer for summary in summaries),
            response_tokens=tuple(summary.num_response_tokens for summary in summaries),
            calls=tuple(summary.num_calls for summary in summaries),
            failed=tuple(summary.num_failed for summary in summaries),
            first_failed=tuple(any(outcome.failed for outcome in summary.outcomes[:1]) for summary in summaries),
            turns=tuple(summary.num_turns for summary in summaries),
            stop_reasons=tuple(summary.stop_reason for summary in summaries),
            unjudged=tuple(summary.unjudged for summary in summaries),
            loosely_correct=tuple(summary.loose == 1.0 for summary in summaries if problem.reward in READ_LOOSELY),
        )

    def as_row(self) -> dict[str, Any]:
        """Its row; `recipes/prepare.py --pass-rates` reads `id` and `num_correct`."""
        columns = {name: [_plain(value) for value in getattr(self, name)] for name in COLUMNS}
        if not self.loosely_correct:
            del columns["loosely_correct"]
        return {"id": self.problem_id, "num_correct": self.num_correct, "k": self.k, **columns}

    @classmethod
    def from_row(cls, problem: Problem, row: Mapping[str, Any]) -> "ProblemResult":
        """What `as_row` wrote."""
        columns = {name: tuple(map(COLUMNS[name], row[name])) for name in COLUMNS if name in row}
        return cls(problem_id=problem.id, family=problem.family, difficulty=problem.difficulty, **columns)


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "correct": bool,
    "answers": str,
    "response_tokens": int,
    "calls": int,
    "failed": int,
    "first_failed": bool,
    "turns": int,
    "stop_reasons": StopReason,
    "unjudged": str,
    "loosely_correct": bool,
}
"""Fields with a value per rollout, and the function that parses a value."""


def _plain(value: Any) -> str | int:
    return value if isinstance(value, str) else int(value)


class ResultLog:
    """A set's results on disk, so that finished problems are not repeated. Used with `with`.

    A row counts only if its problem's text is unchanged.
    """

    def __init__(self, path: Path, problems: Sequence[Problem]) -> None:
        """Reads existing rows; `path` belongs to one evaluation, so all rows have the same settings."""
        self.path = path
        self._problems = {problem.id: problem for problem in problems}
        self._found = {
            row["id"]: ProblemResult.from_row(self._problems[row["id"]], row)
            for row in read_rows(path)
            if row["id"] in self._problems and row["problem_digest"] == _digest(self._problems[row["id"]])
        }
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_torn_row(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        assert self._file is not None
        self._file.close()

    @property
    def problems(self) -> list[Problem]:
        """The whole set."""
        return list(self._problems.values())

    @property
    def missing(self) -> list[Problem]:
        """Problems without a result, in the order of the set."""
        return [problem for problem in self._problems.values() if problem.id not in self._found]

    @property
    def results(self) -> list[ProblemResult]:
        """Of all problems that have one, in the order of the set."""
        return [self._found[problem_id] for problem_id in self._problems if problem_id in self._found]

    def taken(self, what: str) -> str:
        """A message about the problems of `what` that are not repeated; empty where there are none."""
        if not self._found:
            return ""
        return (
            f"{what}: results of {len(self._found)} of {len(self._problems)} problems reused from {self.path} "
            "(same settings); delete it to evaluate them again"
        )

    def add(self, summaries: Sequence[TrajectorySummary]) -> ProblemResult:
        """Store a problem's rollouts; its row is on disk when this returns."""
        assert self._file is not None, "ResultLog is used inside `with`"
        problem = self._problems[summaries[0].problem_id]
        result = ProblemResult.of(problem, summaries)
        self._found[problem.id] = result
        self._file.write(to_row({**result.as_row(), "problem_digest": _digest(problem)}))
        self._file.flush()
        return result


def _digest(problem: Problem) -> str:
    return digest_of(problem.as_row())
