"""avg@k and pass@k on a problem set (arXiv:2508.20722 section 5).

Legend: N problems, k rollouts of each, S bootstrap resamples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rstar_ray.run_dir.metrics import is_correct, tool_error_share_correct
from rstar_ray.trajectory import Problem, TrajectorySummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a part of the problem set went."""

    num_problems: int
    avg_at_k: float
    tool_error_share_correct: float | None  # None without a call in a correct trajectory
    response_tokens_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """One policy on one problem set."""

    stage: str
    step: int  # of the stage, whose weights were evaluated
    problem_set: str
    k: int  # rollouts per problem
    num_problems: int
    avg_at_k: float  # mean pass@1
    ci_low: float  # 95 % bootstrap interval of avg_at_k over problems
    ci_high: float
    pass_at: dict[int, float]  # unbiased pass@j for j = 1, 2, 4, ... and k
    tool_error_share_correct: float | None
    response_tokens_mean: float
    share_truncated: float
    by_family: dict[str, Score]  # empty where problems have no family
    by_difficulty: dict[str, Score]  # empty where problems have no difficulty

    @property
    def pass_at_k(self) -> float:
        """Share of problems solved by any of the k rollouts."""
        return self.pass_at[self.k]

    def as_row(self) -> dict[str, Any]:
        """The row of `evaluations.jsonl`."""
        row = asdict(self)
        row["set"] = row.pop("problem_set")
        row["pass_at_k"] = self.pass_at_k
        return row


def evaluate(
    problems: Sequence[Problem],
    summaries: Sequence[TrajectorySummary],
    *,
    stage: str,
    step: int,
    problem_set: str = "held-out",
    seed: int = 0,
) -> EvaluationResult:
    """Score k rollouts of each problem.

    Raises `ValueError` when the problems do not all have the same number of rollouts: a missing
    rollout is ours to repeat, not the policy's to be charged with.
    """
    rollouts = group_by_problem(problems, summaries)
    k = len(next(iter(rollouts.values())))
    num_correct = [sum(map(is_correct, siblings)) for siblings in rollouts.values()]
    ci_low, ci_high = bootstrap_interval([correct / k for correct in num_correct], seed=seed)
    whole = _score(list(rollouts.values()))
    return EvaluationResult(
        stage=stage,
        step=step,
        problem_set=problem_set,
        k=k,
        num_problems=len(problems),
        avg_at_k=whole.avg_at_k,
        ci_low=ci_low,
        ci_high=ci_high,
        pass_at={j: sum(pass_at_k(k, correct, j) for correct in num_correct) / len(problems) for j in _budgets(k)},
        tool_error_share_correct=whole.tool_error_share_correct,
        response_tokens_mean=whole.response_tokens_mean,
        share_truncated=sum(summary.truncated for summary in summaries) / len(summaries),
        by_family=_scores_by({problem.id: problem.family for problem in problems}, rollouts),
        by_difficulty=_scores_by(
            {problem.id: f"{problem.difficulty:g}" if problem.difficulty else "" for problem in problems}, rollouts
        ),
    )


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Chance that k of the rollouts, drawn without replacement, hold a correct one (arXiv:2107.03374 section 2.1)."""
    if not 1 <= k <= num_rollouts:
        raise ValueError(f"pass@{k} cannot be estimated from {num_rollouts} rollouts")
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def bootstrap_interval(
    rates: Sequence[float], *, confidence: float = 0.95, num_resamples: int = 2_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over problems [N], which are redrawn with replacement.

    It speaks of the choice of problems; where every rate is the same it has no width.
    """
    rate_V, count_V = np.unique(np.asarray(rates, dtype=np.float64), return_counts=True)
    # Only how often each rate is drawn matters.
    drawn_SV = np.random.default_rng(seed).multinomial(len(rates), count_V / len(rates), size=num_resamples)
    means_S = drawn_SV @ rate_V / len(rates)
    low, high = np.quantile(means_S, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def group_by_problem(
    problems: Sequence[Problem], summaries: Sequence[TrajectorySummary]
) -> dict[str, list[TrajectorySummary]]:
    """Rollouts by problem id, in the order of `problems`; `ValueError` unless every problem has equally many."""
    rollouts: dict[str, list[TrajectorySummary]] = {problem.id: [] for problem in problems}
    if not problems:
        raise ValueError("there is no problem to evaluate on")
    for summary in summaries:
        if summary.problem_id not in rollouts:
            raise ValueError(f"rollout {summary.rollout_id} is of {summary.problem_id}, which is not evaluated")
        rollouts[summary.problem_id].append(summary)
    k = max(len(siblings) for siblings in rollouts.values())
    for problem_id, siblings in rollouts.items():
        if len(siblings) != k or k == 0:
            raise ValueError(f"problem {problem_id} has {len(siblings)} rollouts where others have {k}")
    return rollouts


def _score(groups: Sequence[Sequence[TrajectorySummary]]) -> Score:
    summaries = [summary for siblings in groups for summary in siblings]
    return Score(
        num_problems=len(groups),
        avg_at_k=sum(map(is_correct, summaries)) / len(summaries),
        tool_error_share_correct=tool_error_share_correct(summaries),
        response_tokens_mean=sum(summary.num_response_tokens for summary in summaries) / len(summaries),
    )


def _scores_by(label: Mapping[str, str], rollouts: Mapping[str, Sequence[TrajectorySummary]]) -> dict[str, Score]:
    """Scores of the problems that share a label; unlabelled problems are left out."""
    parts: dict[str, list[Sequence[TrajectorySummary]]] = {}
    for problem_id, siblings in rollouts.items():
        if label[problem_id]:
            parts.setdefault(label[problem_id], []).append(siblings)
    return {name: _score(parts[name]) for name in sorted(parts)}


def _budgets(k: int) -> list[int]:
    """1, 2, 4, ... below k, and k."""
    return [2**power for power in range(k.bit_length()) if 2**power < k] + [k]
