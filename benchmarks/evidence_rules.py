"""Rules and a reward of the controls in `benchmarks/evidence_plan.py`."""

from __future__ import annotations  # the processes of a reward need not import torch

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rstar_ray.algorithm.surrogate import SampledTokens
    from rstar_ray.config import AlgorithmConfig
    from rstar_ray.trajectory import Problem, Transcript

RATE = 0.23
"""pass@1 of the SFT policy, which the random reward pays as often."""


def coin(completion: str, problem: Problem, rollout: Transcript) -> float:
    """1 at random, whatever the rollout says; the same for a rollout that is repeated."""
    return float(zlib.crc32(rollout.rollout_id.encode()) < RATE * 2**32)


def right_only(rewards: Sequence[float], algorithm: AlgorithmConfig) -> list[float]:
    """Rejection sampling: rollouts that are right count alike, the others for nothing."""
    return [float(reward > 0) for reward in rewards]


def likelihood(tokens: SampledTokens, algorithm: AlgorithmConfig) -> Tensor:
    """Cross-entropy, weighted by the advantage."""
    return -tokens.advantages_N * tokens.logprobs_N
