"""Group-relative advantages (arXiv:2508.20722 Eq. 7). Legend: G trajectories of one prompt group."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def rewards_differ(rewards_G: Sequence[float]) -> bool:
    """Whether the group carries a signal; without a difference every advantage is zero."""
    return len(set(rewards_G)) > 1


def group_advantages(rewards_G: Sequence[float], *, divide_by_std: bool = True) -> NDArray[np.float64]:
    """A_i = (r_i - mean r) / std r, shape [G]; the population standard deviation, zeros for equal rewards.

    `divide_by_std=False` keeps only the difference from the mean (Dr. GRPO, arXiv:2503.20783).
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.size == 0 or not rewards_differ(rewards_G):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / rewards.std() if divide_by_std else centred
