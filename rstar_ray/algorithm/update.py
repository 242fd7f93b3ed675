"""What one update of the policy did, and what SFT trains on."""

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
class UpdateFigures:
    """What the learner says of one update; means are over trained tokens of all ranks."""

    loss: float
    grad_norm: float
    entropy: float  # nats per token
    clip_share: float  # tokens whose ratio was clipped
    logprob_diff_mean: float  # |old_logprobs - rollout_logprobs|: learner against engine
    logprob_diff_max: float
    lr: float
    ratio_mean: float = 1.0  # to the policy before the step's first update; 1 where there is but one
    ratio_max: float = 1.0
    kl: float | None = None  # mean k3 to the reference; None without one
    correction_mean: float = 1.0  # mean weight given for the gap between engine and learner
    old_logprobs_drift: float | None = None  # largest difference of those of a pass of their own; None: not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult(UpdateFigures):
    """What one update did, over all ranks; means are over the tokens trained on."""

    applied: bool  # False: nothing to train on, or a loss or gradient that is not finite; the weights are unchanged
    reason: str  # why it was not applied, or not all of it
    step: int  # optimizer steps applied so far
    tokens: int  # tokens trained on: sampled, or the assistant's
    input_tokens: int  # tokens that went through the model, padding apart
    padding_waste: float  # share of the model's input that was padding
    seconds: float
    bad_updates: int = 0  # not finite, in a row, the newest included; most of a call's several updates
    refused: tuple[int, ...] = ()  # those not applied, of a call's several updates by number; the others were
    left_out: tuple[LeftOut, ...] = ()  # of the rows handed in
