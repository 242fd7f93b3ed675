"""What one update of the policy did, and what SFT trains on."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SftExample:
    """One conversation as tokens."""

    token_ids: NDArray[np.int32]  # [L]
    loss_mask: NDArray[np.bool_]  # [L] True on what the assistant says, its end-of-turn token included
    name: str = ""  # file and row, for messages

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTokens:
    """What the learner saw of one row's N sampled tokens, in the forward pass of its update."""

    entropies: NDArray[np.float32]  # [N] of the distribution that the token was drawn from, nats
    logprob_diffs: NDArray[np.float32]  # [N] its log-prob before the update, less the engine's at sampling


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that the learner did not train on, and why."""

    rollout_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one update did, over all ranks."""

    applied: bool  # False: nothing to train on, or a loss or gradient that is not finite; the weights are unchanged
    reason: str  # why it was not applied, or not all of it
    step: int  # optimizer steps applied so far
    metrics: Mapping[str, float]  # by the names of rstar_ray/telemetry/registry.py
    bad_updates: int = 0  # the newest ones that were not finite, in a row
    refused: tuple[int, ...] = ()  # those not applied, of a call's several updates by number; the others were
    left_out: tuple[LeftOut, ...] = ()  # of the rows handed in
