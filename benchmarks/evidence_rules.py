"""Rules and a reward for the controls in `benchmarks/evidence_plan.py`."""

from __future__ import annotations  # so that reward processes do not import torch

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rstar_ray.algorithm.surrogate import SampledTokens
    from rstar_ray.config import AlgorithmConfig
    from rstar_ray.trajectory import Problem, Transcript

RATE = 0.23
"""pass@1 of the SFT policy, which is also the rate of the random reward."""


def coin(completion: str, problem: Problem, rollout: Transcript) -> float:
    """1 at random, independent of the text; the same if the rollout is repeated.

    A cryptographic hash, because ids of siblings differ in one digit: with a checksum their rewards would depend on
    each other.
    """
    digest = hashlib.blake2b(rollout.rollout_id.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") < RATE * 2**64)


def right_only(rewards: Sequence[float], algorithm: AlgorithmConfig) -> list[float]:
    """Rejection sampling: correct rollouts have weight 1, all others 0."""
    return [float(reward > 0) for reward in rewards]


def likelihood(tokens: SampledTokens, algorithm: AlgorithmConfig) -> Tensor:
    """Cross-entropy, weighted by the advantage."""
    return -tokens.advantages_N * tokens.logprobs_N
