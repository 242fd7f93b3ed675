"""Resample-on-Correct (arXiv:2508.20722 section 2.2, Eq. 4 and 5). Legend: G kept per prompt, N candidates (2G)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rstar_ray.config import AlgorithmConfig
from rstar_ray.trajectory import TrajectorySummary

NO_CALL_PENALTY = 0.5
"""p_err of a trajectory that never called the tool (Eq. 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What resampling reads of a trajectory; a `TrajectorySummary` has the same fields and serves as one."""

    reward: float
    num_calls: int
    num_failed: int
    num_answers: int
    num_turns: int


@dataclass(frozen=True, kw_only=True)
class ResampleRule:
    """What can be chosen of resampling, the released code's knobs under their names there (microsoft/rStar).

    `resample_rule` makes it.
    """

    least_failures: int  # kept by the paper's rule
    min_zero_reward_trace_num: int
    min_non_zero_reward_trace_num: int
    roc_error_ratio: bool
    roc_answer_format: bool


def resample_rule(algorithm: AlgorithmConfig) -> ResampleRule:
    """As a run sets it; the knobs named `roc` hold for the paper's rule too."""
    return ResampleRule(
        least_failures=algorithm.least_failures,
        min_zero_reward_trace_num=algorithm.min_zero_reward_trace_num,
        min_non_zero_reward_trace_num=algorithm.min_non_zero_reward_trace_num,
        roc_error_ratio=algorithm.roc_error_ratio,
        roc_answer_format=algorithm.roc_answer_format,
    )


def error_penalty(num_calls: int, num_failed: int) -> float:
    """p_err in [0, 1] (Eq. 4): failed tool calls over tool calls; 0.5 without any call.

    Raises ValueError for counts that cannot be.
    """
    if num_calls < 0:
        raise ValueError(f"num_calls: {num_calls} is below 0")
    if not 0 <= num_failed <= num_calls:
        raise ValueError(f"num_failed: {num_failed} of {num_calls} calls")
    return num_failed / num_calls if num_calls else NO_CALL_PENALTY


def format_penalty(num_answers: int, num_turns: int) -> float:
    """p_format in [0, 1] (Eq. 5): 1 without an answer; 0 with one; more answers cost by their share of the turns."""
    if num_answers < 1:
        return 1.0
    return min(1.0, (num_answers - 1) / max(num_turns, 1))


def total_penalty(candidate: Candidate | TrajectorySummary, rule: ResampleRule) -> float:
    """p_total in [0, 2], of the parts that are switched on."""
    error = error_penalty(candidate.num_calls, candidate.num_failed) if rule.roc_error_ratio else 0.0
    form = format_penalty(candidate.num_answers, candidate.num_turns) if rule.roc_answer_format else 0.0
    return error + form


def resample_on_correct(
    candidates: Sequence[Candidate | TrajectorySummary],
    keep: int,
    rng: np.random.Generator,
    mode: Literal["paper", "release", "random"],
    rule: ResampleRule,
) -> list[int]:
    """Indices of the kept candidates, ascending, no one twice.

    paper: the negatives' share of G, rounded down, uniformly (floor(n_neg / 2) of N = 2G; where our own failures lost
    some of the N, of those left), but at least `rule.least_failures` of them; the rest positives, drawn without
    replacement with probability inversely proportional to p_total. release: positives sorted by penalty and cut.
    random: all alike, whatever their reward.
    Where a side has too few, the other fills up; with `keep` candidates or fewer, all are kept.

    Raises ValueError where `keep` is below 1, `mode` is none of them, or a reward is no number.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    if mode not in ("paper", "release", "random"):
        raise ValueError(f"mode must be paper, release or random, not {mode!r}")
    if any(math.isnan(candidate.reward) for candidate in candidates):
        raise ValueError("reward must be a number, not NaN")
    if len(candidates) <= keep:
        return list(range(len(candidates)))
    if mode == "random":
        return sorted(_uniform(list(range(len(candidates))), keep, rng))
    positives = [i for i, candidate in enumerate(candidates) if candidate.reward > 0]
    negatives = [i for i, candidate in enumerate(candidates) if candidate.reward <= 0]
    if mode == "release":
        kept = _release(candidates, positives, negatives, keep, rule)
    else:
        num_negatives = _num_negatives(len(positives), len(negatives), keep, rule.least_failures)
        kept = _uniform(negatives, num_negatives, rng) + _by_penalty(
            positives, [total_penalty(candidates[i], rule) for i in positives], keep - num_negatives, rng
        )
    return sorted(kept)


def _num_negatives(num_positives: int, num_negatives: int, keep: int, least: int) -> int:
    """As many as leave the share of failures as it is, rounded down as in the paper; `least` of them where they are."""
    share = num_negatives * keep // (num_positives + num_negatives)
    wanted = max(share, min(least, num_negatives, keep - 1))  # a success keeps its place
    return max(wanted, keep - num_positives)  # too few positives: failures fill the group


def _uniform(indices: list[int], count: int, rng: np.random.Generator) -> list[int]:
    return [int(i) for i in rng.choice(indices, size=count, replace=False)] if count else []


def _by_penalty(indices: list[int], penalties: list[float], count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` without replacement, each draw with probability proportional to 1 / penalty.

    The paper leaves p_total = 0 open: its weight is infinite, so flawless trajectories come first, uniformly
    among themselves, and the rest of the draws go to the others.
    """
    flawless = [i for i, penalty in zip(indices, penalties, strict=True) if penalty == 0]
    if len(flawless) >= count:
        return _uniform(flawless, count, rng)
    flawed = [(i, penalty) for i, penalty in zip(indices, penalties, strict=True) if penalty > 0]
    weights = np.array([1.0 / penalty for _, penalty in flawed])
    drawn = rng.choice([i for i, _ in flawed], size=count - len(flawless), replace=False, p=weights / weights.sum())
    return flawless + [int(i) for i in drawn]


def _release(
    candidates: Sequence[Candidate | TrajectorySummary],
    positives: list[int],
    negatives: list[int],
    keep: int,
    rule: ResampleRule,
) -> list[int]:
    """The released rule: halve each side, at least `min_*` of it, positives sorted by penalty, negatives the first.

    Each side's share is rounded as there, halves to the even number; positives then fill what the sum leaves.
    """

    least_negative = min(rule.min_zero_reward_trace_num, len(negatives), keep)
    least_positive = min(rule.min_non_zero_reward_trace_num, len(positives), keep - least_negative)
    num_negatives = round(len(negatives) * keep / len(candidates))
    num_negatives = max(num_negatives, least_negative, keep - len(positives))
    num_negatives = min(num_negatives, keep - least_positive, len(negatives))
    best = sorted(positives, key=lambda i: total_penalty(candidates[i], rule))  # stable: ties keep their order
    return negatives[:num_negatives] + best[: keep - num_negatives]
