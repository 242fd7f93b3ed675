"""Resample-on-Correct (arXiv:2508.20722 section 2.2, Eq. 4 and 5). Legend: G kept per prompt, N candidates (2G)."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from rstar_ray.algorithm.advantage import ROUNDING
from rstar_ray.config import AlgorithmConfig
from rstar_ray.trajectory import TrajectorySummary

NO_CALL_PENALTY = 0.5
"""p_err of a trajectory that never called the tool (Eq. 4)."""


def error_penalty(num_calls: int, num_failed: int) -> float:
    """p_err in [0, 1] (Eq. 4): failed tool calls over tool calls; 0.5 without any call.

    Raises ValueError for counts that cannot be.
    """
    if num_calls < 0:
        raise ValueError(f"num_calls: {num_calls} is below 0")
    if not 0 <= num_failed <= num_calls:
        raise ValueError(f"num_failed: {num_failed} of {num_calls} calls")
    return num_failed / num_calls if num_calls else NO_CALL_PENALTY


def format_penalty(num_answers: int | None, num_turns: int) -> float:
    """p_format in [0, 1] (Eq. 5): 1 without an answer; 0 with one; more answers cost by their share of the turns.

    0 for None: a reward that reads no marked answer, as of code or an environment, has no format to penalise.
    """
    if num_answers is None:
        return 0.0
    if num_answers < 1:
        return 1.0
    return min(1.0, (num_answers - 1) / max(num_turns, 1))


def total_penalty(candidate: TrajectorySummary, algorithm: AlgorithmConfig) -> float:
    """p_total in [0, 2], the sum of the enabled parts."""
    error = error_penalty(candidate.num_calls, candidate.num_failed) if algorithm.roc_error_ratio else 0.0
    form = format_penalty(candidate.num_answers, candidate.num_turns) if algorithm.roc_answer_format else 0.0
    return error + form


def resample_on_correct(
    candidates: Sequence[TrajectorySummary],
    algorithm: AlgorithmConfig,
    rng: np.random.Generator,
) -> list[int]:
    """Indices of the kept candidates, in ascending order and without repetition.

    A candidate is a failure if its reward is 0 or below, and a success otherwise. If there are at most `keep`
    candidates, all of them are kept. If one side has too few candidates, the other side fills the remaining places.

    paper: failures keep their share of the group, rounded down (floor(n_neg / 2) of N = 2G), but at least
    `least_failures` of them; they are drawn uniformly. Successes fill the other places. Successes of equal reward
    are drawn without replacement, with probability inversely proportional to p_total.
    release: failures in their order; successes of equal reward sorted by p_total.
    random: uniform over all candidates.

    With graded rewards, each reward value keeps its share among the kept successes (`_quotas`): penalties only decide
    between successes of equal reward. Where all rewards differ, the successes are therefore a uniform sample.

    Raises ValueError if a reward is not finite.
    """
    keep, mode = algorithm.keep, algorithm.resample
    for candidate in candidates:
        if not math.isfinite(candidate.reward):
            raise ValueError(f"reward must be finite, got {candidate.reward}")
    if len(candidates) <= keep:
        return list(range(len(candidates)))
    if mode == "random":
        return sorted(_uniform(list(range(len(candidates))), keep, rng))
    positives = [i for i, candidate in enumerate(candidates) if candidate.reward > 0]
    negatives = [i for i, candidate in enumerate(candidates) if candidate.reward <= 0]
    if mode == "release":
        num_negatives = _num_negatives_released(len(positives), len(negatives), algorithm)
        kept = negatives[:num_negatives]
    else:
        num_negatives = _num_negatives(len(positives), len(negatives), keep, algorithm.least_failures)
        kept = _uniform(negatives, num_negatives, rng)
    same_reward = _by_reward(candidates, positives)
    quotas = _quotas([len(indices) for indices in same_reward], keep - num_negatives, rng)
    for indices, quota in zip(same_reward, quotas, strict=True):
        penalties = [total_penalty(candidates[i], algorithm) for i in indices]
        if mode == "release":
            kept += _lowest(indices, penalties, quota)
        else:
            kept += _by_penalty(indices, penalties, quota, rng)
    return sorted(kept)


def keep_all(
    candidates: Sequence[TrajectorySummary], algorithm: AlgorithmConfig, rng: np.random.Generator
) -> list[int]:
    """Plain GRPO: trains on every drawn trajectory."""
    return list(range(len(candidates)))


RESAMPLING = {
    "paper": resample_on_correct,
    "release": resample_on_correct,
    "random": resample_on_correct,
    "none": keep_all,
}
"""The built-in rules of `--algorithm.resample`."""


def _by_reward(candidates: Sequence[TrajectorySummary], indices: list[int]) -> list[list[int]]:
    """The indices grouped by equal reward, lowest reward first; within a group they stay in order."""
    groups: list[list[int]] = []
    for i in sorted(indices, key=lambda i: candidates[i].reward):
        reward = candidates[i].reward
        if groups and reward - candidates[groups[-1][0]].reward <= ROUNDING * reward:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _quotas(counts: Sequence[int], places: int, rng: np.random.Generator) -> list[int]:
    """Places of each reward value, in proportion to the `counts` of candidates that have it.

    Each proportional share is rounded down or up at random, so that the expected quota is exactly the share (systematic
    sampling). Deterministic rounding would never keep a value that few candidates have, such as a single full reward.
    """
    if len(counts) < 2:
        return [places] * len(counts)  # no draw: 0/1 rewards need none
    total = sum(counts)
    offset = int(rng.integers(total))
    return [
        end - start for start, end in pairwise((n * places + offset) // total for n in accumulate(counts, initial=0))
    ]


def _num_negatives(num_positives: int, num_negatives: int, keep: int, least: int) -> int:
    """The number of failures to keep: their share of the group, rounded down as in the paper; at least `least`,
    where there are as many.
    """
    share = num_negatives * keep // (num_positives + num_negatives)
    wanted = max(share, min(least, num_negatives, keep - 1))  # at least one success stays
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


def _lowest(indices: list[int], penalties: list[float], count: int) -> list[int]:
    """The `count` lowest penalties, earlier indices first among equal ones (release)."""
    ranked = sorted(zip(penalties, indices, strict=True))
    return [i for _, i in ranked[:count]]


def _num_negatives_released(num_positives: int, num_negatives: int, algorithm: AlgorithmConfig) -> int:
    """The released rule: halve each side, keep at least `min_*` of it, and round halves to even as the release does."""
    keep = algorithm.keep
    least_negative = min(algorithm.min_zero_reward_trace_num, num_negatives, keep)
    least_positive = min(algorithm.min_non_zero_reward_trace_num, num_positives, keep - least_negative)
    share = round(num_negatives * keep / (num_positives + num_negatives))
    wanted = max(share, least_negative, keep - num_positives)
    return min(wanted, keep - least_positive, num_negatives)
