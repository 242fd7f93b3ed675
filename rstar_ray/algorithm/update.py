"""The result of one update of the policy, and the rows of SFT."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SftExample:
    """One conversation as tokens."""

    token_ids: NDArray[np.int32]  # [L]
    loss_mask: NDArray[np.bool_]  # [L] True on the assistant's tokens, including end of turn
    name: str = ""  # file and row, for messages

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTokens:
    """The learner's statistics of one row's N sampled tokens, from the forward pass of its update."""

    entropies: NDArray[np.float32]  # [N] of the distribution that the token was drawn from, nats
    logprob_diffs: NDArray[np.float32]  # [N] log-prob before the update minus the engine's at sampling


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that the learner did not train on, with the reason."""

    rollout_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The result of one update, over all ranks."""

    applied: bool  # False: no rows, or a loss or gradient that is not finite; the weights are unchanged
    reason: str  # why it was not, or only partly, applied
    step: int  # optimizer steps applied so far
    metrics: Mapping[str, float]  # by the names of rstar_ray/telemetry/registry.py
    bad_updates: int = 0  # largest number of consecutive non-finite updates in this call, with those before it
    refused: tuple[int, ...] = ()  # of several updates in one call, the indices of those not applied
    left_out: tuple[LeftOut, ...] = ()  # of the rows in the call
