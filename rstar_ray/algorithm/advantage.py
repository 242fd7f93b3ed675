"""Group-relative advantages (arXiv:2508.20722 Eq. 7). Legend: G trajectories of one prompt group."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-12
"""Rewards closer than this share of the largest are equal: 0.1 + 0.2 and 0.3."""


def rewards_differ(rewards_G: Sequence[float]) -> bool:
    """Whether the group carries a signal; without a difference every advantage is zero.

    Raises ValueError for a reward that is no finite number.
    """
    return _differ(_as_array(rewards_G))


def group_advantages(rewards_G: Sequence[float], *, divide_by_std: bool = True) -> NDArray[np.float64]:
    """A_i = (r_i - mean r) / std r, shape [G]; the population standard deviation, zeros for equal rewards.

    `divide_by_std=False` keeps only the difference from the mean (Dr. GRPO, arXiv:2503.20783). Raises ValueError for
    a reward that is no finite number.
    """
    rewards = _as_array(rewards_G)
    if not _differ(rewards):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / rewards.std() if divide_by_std else centred


def _as_array(rewards_G: Sequence[float]) -> NDArray[np.float64]:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards_G: {rewards.tolist()} are not all finite")
    return rewards


def _differ(rewards: NDArray[np.float64]) -> bool:
    return rewards.size > 0 and bool(np.ptp(rewards) > ROUNDING * np.abs(rewards).max())
