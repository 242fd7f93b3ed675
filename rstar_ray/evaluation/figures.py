"""avg@k, pass@k and maj@k on a problem set (arXiv:2508.20722 section 5), with intervals.

Legend: N problems, k rollouts of each, S bootstrap resamples.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from rstar_ray.evaluation.results import ProblemResult
from rstar_ray.trajectory import StopReason

Interval = tuple[float, float]
"""95 % bootstrap interval over problems."""
CONFIDENCE = 0.95
NUM_RESAMPLES = 2_000
AT_ONCE = 50
"""Resamples per batch: all at once would take gigabytes where there are many problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """One policy on one problem set. `result["avg_at_k"]` is one of its figures; `FIGURES` names and defines them."""

    stage: str
    step: int  # of the stage, whose weights were evaluated
    problem_set: str
    k: int  # rollouts per problem
    num_problems: int
    figures: dict[str, float | None]  # by name; None where undefined, such as a share of zero calls
    intervals: dict[str, Interval]  # of the figures that are not None
    pass_at: dict[int, float]  # unbiased pass@j for j = 1, 2, 4, ... and k
    num_unjudged: int  # rollouts whose answer could not be judged; they count as not right
    by_family: dict[str, dict[str, float | None]]  # SCORE of the problems of a family; empty without families
    by_difficulty: dict[str, dict[str, float | None]]  # the same; empty where problems have no difficulty

    def __getitem__(self, name: str) -> float | None:
        return self.figures[name]

    def as_row(self) -> dict[str, Any]:
        """The row of `evaluations.jsonl`."""
        row = {**asdict(self), "set": self.problem_set, **self.figures}
        row["ci_low"], row["ci_high"] = self.intervals["avg_at_k"]
        for name in ("problem_set", "figures", *(["loose_avg_at_k"] if self["loose_avg_at_k"] is None else [])):
            del row[name]
        return row


def evaluate(
    results: Sequence[ProblemResult], *, stage: str, step: int, problem_set: str = "held-out", seed: int = 0
) -> EvaluationResult:
    """The figures of k rollouts of each problem.

    Raises `ValueError` when the problems do not all have the same number of rollouts: missing rollouts are
    repeated, not counted against the policy.
    """
    k = _rollouts_of_each(results)
    parts = {name: [part(result) for result in results] for name, part in FIGURES.items()}
    if not _has_votes(results):
        parts["maj_at_k"] = [(0, 0)] * len(results)
    intervals = {name: bootstrap_interval(of_problems, seed=seed) for name, of_problems in parts.items()}
    return EvaluationResult(
        stage=stage,
        step=step,
        problem_set=problem_set,
        k=k,
        num_problems=len(results),
        figures={name: _ratio(of_problems) for name, of_problems in parts.items()},
        intervals={name: interval for name, interval in intervals.items() if interval is not None},
        pass_at={j: sum(pass_at_k(k, one.num_correct, j) for one in results) / len(results) for j in _budgets(k)},
        num_unjudged=sum(map(bool, chain.from_iterable(result.unjudged for result in results))),
        by_family=_scores_by([result.family for result in results], results),
        by_difficulty=_scores_by(
            [f"{result.difficulty:g}" if result.difficulty else "" for result in results], results
        ),
    )


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Chance that k of the rollouts, drawn without replacement, hold a correct one (arXiv:2107.03374 section 2.1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_rollouts:
        raise ValueError(f"pass@{k} cannot be estimated from {num_rollouts} rollouts")
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def majority_is_right(correct_k: Sequence[bool], answers_k: Sequence[str]) -> float:
    """maj@k of one problem (arXiv:2203.11171): chance that the most frequent answer is right, ties at random.

    Answers that were judged right are one answer, however they are written; of the others equal texts are. A rollout
    without an answer has no vote.

    >>> majority_is_right([True, True, False], ["1/2", "0.5", "2"])
    1.0
    >>> majority_is_right([True, False, False], ["1", "2", ""])
    0.5
    """
    right = sum(correct_k)
    wrong = Counter(
        answer.strip() for is_right, answer in zip(correct_k, answers_k, strict=True) if not is_right and answer.strip()
    )
    most = max([right, *wrong.values()])
    if right == 0 or right < most:
        return 0.0
    return 1.0 / (1 + sum(votes == most for votes in wrong.values()))


def _has_votes(results: Sequence[ProblemResult]) -> bool:
    """Whether maj@k means something: answers were written, and every rollout judged right has one.

    Environments and rewards such as code judge rollouts without an answer. Nothing could be voted on there, and any
    right rollout would win: maj@k would repeat pass@k.
    """
    rollouts = [pair for result in results for pair in zip(result.correct, result.answers, strict=True)]
    return any(answer.strip() for _, answer in rollouts) and all(answer.strip() for right, answer in rollouts if right)


def bootstrap_interval(parts: Sequence[tuple[float, float]], *, seed: int = 0) -> Interval | None:
    """95 % percentile interval of sum(numerators) / sum(denominators) over problems [N], redrawn with replacement.

    It covers the choice of problems. None where every denominator is 0.
    """
    part_V2, count_V = np.unique(np.asarray(parts, dtype=np.float64), axis=0, return_counts=True)
    rng = np.random.default_rng(seed)
    sums_S2 = [
        rng.multinomial(len(parts), count_V / len(parts), size=min(AT_ONCE, NUM_RESAMPLES - done)) @ part_V2
        for done in range(0, NUM_RESAMPLES, AT_ONCE)
    ]
    top_S, bottom_S = np.concatenate(sums_S2).T
    known = bottom_S > 0
    if not known.any():
        return None
    low, high = np.quantile(top_S[known] / bottom_S[known], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _rollouts_of_each(results: Sequence[ProblemResult]) -> int:
    if not results:
        raise ValueError("there is no problem to evaluate on")
    k = max(result.k for result in results)
    for result in results:
        if result.k != k or k == 0:
            raise ValueError(f"problem {result.problem_id} has {result.k} rollouts where others have {k}")
    return k


def _ratio(parts: Sequence[tuple[float, float]]) -> float | None:
    top, bottom = (sum(column) for column in zip(*parts, strict=True))
    return top / bottom if bottom else None


def _in_correct(counts_k: Sequence[int], result: ProblemResult) -> int:
    return sum(count for count, right in zip(counts_k, result.correct, strict=True) if right)


def _right_where(result: ProblemResult, *, failed: bool) -> int:
    return sum(right and first is failed for right, first in zip(result.correct, result.first_failed, strict=True))


FIGURES: dict[str, Callable[[ProblemResult], tuple[float, float]]] = {
    "avg_at_k": lambda result: (result.num_correct, result.k),
    "pass_at_k": lambda result: (result.num_correct > 0, 1),
    "maj_at_k": lambda result: (majority_is_right(result.correct, result.answers), 1),
    "loose_avg_at_k": lambda result: (sum(result.loosely_correct), len(result.loosely_correct)),
    "tool_error_rate": lambda result: (sum(result.failed), sum(result.calls)),
    "tool_error_rate_correct": lambda result: (_in_correct(result.failed, result), _in_correct(result.calls, result)),
    "right_after_failed_call": lambda result: (_right_where(result, failed=True), sum(result.first_failed)),
    "right_without_failed_call": lambda result: (
        _right_where(result, failed=False),
        result.k - sum(result.first_failed),
    ),
    "calls_mean": lambda result: (sum(result.calls), result.k),
    "response_tokens_mean": lambda result: (sum(result.response_tokens), result.k),
    "frac_truncated": lambda result: (sum(reason.truncated for reason in result.stop_reasons), result.k),
    "frac_max_turns": lambda result: (result.stop_reasons.count(StopReason.MAX_TURNS), result.k),
}
"""A problem's contributions to the numerator and the denominator of each figure.

`maj_at_k` is the share of problems whose most frequent answer is right, ties at random. `loose_avg_at_k` scores
answers loosely (IFEval), on problems with such a rule.
"""
SCORE = ("avg_at_k", "tool_error_rate_correct", "response_tokens_mean")
"""Figures of a subset of the problems."""


def _scores_by(labels: Sequence[str], results: Sequence[ProblemResult]) -> dict[str, dict[str, float | None]]:
    """Scores of the problems that share a label; unlabelled problems are excluded."""
    groups: dict[str, list[ProblemResult]] = {}
    for label, result in zip(labels, results, strict=True):
        if label:
            groups.setdefault(label, []).append(result)
    return {
        label: {"num_problems": len(group), **{name: _ratio([FIGURES[name](one) for one in group]) for name in SCORE}}
        for label, group in sorted(groups.items())
    }


def _budgets(k: int) -> list[int]:
    """1, 2, 4, ... below k, and k."""
    return [2**power for power in range(k.bit_length()) if 2**power < k] + [k]
