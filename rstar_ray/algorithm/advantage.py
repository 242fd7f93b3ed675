"""Group-relative advantages (arXiv:2508.20722 Eq. 7). Legend: G trajectories of one prompt group."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rstar_ray.config.algorithm import AlgorithmConfig, Deviation

Advantage = float | NDArray[np.float32]
"""The advantage of a trajectory: one number for all its sampled tokens, or an array with one per token."""
ROUNDING = 1e-12
"""Rewards that differ by less than this share of the largest are equal, such as 0.1 + 0.2 and 0.3."""


def rewards_differ(rewards_G: Sequence[float]) -> bool:
    """Whether the group carries a signal; without a difference every advantage is zero.

    Raises ValueError for a reward that is not finite.
    """
    return _differ(_as_array(rewards_G))


def group_advantages(rewards_G: Sequence[float], *, deviation: Deviation) -> NDArray[np.float64]:
    """A_i = (r_i - mean r) / std r, shape [G]; zeros for equal rewards.

    The group is its own baseline: there is no critic, and so no GAE. Raises ValueError for a reward that is not
    finite.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], deviation="population").tolist()
    [1.0, -1.0, -1.0, 1.0]
    """
    rewards = _as_array(rewards_G)
    if not _differ(rewards):
        return np.zeros_like(rewards)
    if deviation == "none":
        return rewards - rewards.mean()
    rewards = np.ldexp(rewards, -np.frexp(np.abs(rewards).max())[1])  # so that squares neither underflow nor overflow
    return (rewards - rewards.mean()) / rewards.std(ddof=1 if deviation == "sample" else 0)


def standardised(rewards_G: Sequence[float], algorithm: AlgorithmConfig) -> NDArray[np.float64]:
    """`group_advantages` with the run's settings."""
    return group_advantages(rewards_G, deviation=algorithm.advantage_std)


def leave_one_out(rewards_G: Sequence[float], algorithm: AlgorithmConfig) -> NDArray[np.float64]:
    """RLOO (arXiv:2402.14740 Eq. 8): A_i = r_i less the mean reward of the other G - 1; zeros for one trajectory.

    >>> leave_one_out([1.0, 0.0, 0.5], AlgorithmConfig()).tolist()
    [0.75, -0.75, 0.0]
    """
    rewards = _as_array(rewards_G)
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def mean_advantage(advantage: Advantage) -> float:
    """The mean over the sampled tokens; 0 without one."""
    return float(np.mean(advantage, dtype=np.float64)) if np.size(advantage) else 0.0


def overlong_penalty(num_tokens: int, *, limit: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476 Eq. 13): 0 up to limit - buffer, from there linearly to -1.

    >>> tuple(overlong_penalty(n, limit=100, buffer=20) for n in (80, 90, 100, 120))
    (0.0, -0.5, -1.0, -1.0)
    """
    return max(-1.0, min(0.0, (limit - buffer - num_tokens) / buffer)) if buffer else 0.0


ADVANTAGES = {"group": standardised, "rloo": leave_one_out}
"""The built-in rules of `--algorithm.advantage`."""


def _as_array(rewards_G: Sequence[float]) -> NDArray[np.float64]:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards_G: {rewards.tolist()} are not all finite")
    return rewards


def _differ(rewards: NDArray[np.float64]) -> bool:
    return rewards.size > 0 and bool(np.ptp(rewards) > ROUNDING * np.abs(rewards).max())
