"""Three published rules that are not built in: an advantage, a loss and a resampling rule of your own.

rstar stage 1 --own-folder examples --algorithm.advantage own_rules:max_likelihood --run-dir runs/maxrl
rstar stage 1 --own-folder examples --algorithm.loss own_rules:soft_gate --algorithm.normalisation sequence \\
    --run-dir runs/sapo
rstar stage 1 --own-folder examples --algorithm.resample own_rules:max_variance --run-dir runs/pods
"""

import numpy as np
import torch
from torch import Tensor

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05
"""SAPO's temperatures for tokens of positive and of other advantages."""


def max_likelihood(rewards, algorithm) -> list[float]:
    """MaxRL (arXiv:2602.02710): (r - mean r) / mean r, which gives rare successes more weight; zeros without one."""
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) / mean if mean > 1e-9 else 0.0 for reward in rewards]  # a penalty can make it negative


def soft_gate(tokens, algorithm) -> Tensor:
    """SAPO (arXiv:2511.20347): -(4 / tau) sigmoid(tau (ratio - 1)) A, a smooth gate in place of a clip."""
    tau_N = torch.where(tokens.advantages_N > 0, TAU_POSITIVE, TAU_NEGATIVE)
    ratio_N = torch.exp((tokens.logprobs_N - tokens.old_logprobs_N).clamp(max=20.0))
    return -4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1)) * tokens.advantages_N


def max_variance(candidates, algorithm, rng) -> list[int]:
    """PODS (arXiv:2504.13818): the rollouts of the highest and the lowest rewards, so that their variance is largest.

    Ties are broken at random.
    """
    rewards = np.array([candidate.reward for candidate in candidates])
    shuffled = rng.permutation(len(rewards))
    order = shuffled[np.argsort(rewards[shuffled], kind="stable")]
    above = len(order) - min(algorithm.keep, len(order))  # left out between the two ends
    splits = [np.delete(order, slice(low, low + above)) for low in range(len(order) - above + 1)]
    return max(splits, key=lambda kept: rewards[kept].var()).tolist()
