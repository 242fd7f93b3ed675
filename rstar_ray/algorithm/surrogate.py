"""The rules of `--algorithm.loss`: what the policy is trained to maximise, token by token.

Legend: N sampled tokens of a micro batch, rows laid end to end; R rows (trajectories). `rows_N` names the row of each
token. The ratio of a token is its probability under the policy now over that under the old policy, `old_logprobs_N`.
`rstar_ray.algorithm.off_policy` decides which policy is the old one.

A rule is one function and one row of `LOSSES`. It returns a `Surrogate`, or the loss of each token as a tensor [N].
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rstar_ray.config import AlgorithmConfig

MOST_LOG_RATIO = 20.0  # exp overflows float32 at 88, and inf times an advantage of 0 is NaN; a ratio of 5e8 says enough
DPPO_CAP = 20.0  # of the ratio; verl's default (`clip_ratio_c` of its dppo_tv): a lower cap adds a bias


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The inputs of a loss rule, of one micro batch on one rank; all but `rows_N` are float.

    A mean, quantile or maximum over all tokens depends on how rows are packed into micro batches; sums within a row
    do not.
    """

    logprobs_N: Tensor  # of the policy now: the gradient flows through these and the entropies
    entropy_N: Tensor
    old_logprobs_N: Tensor  # of the old policy: the learner before the step's first update, or the sampler
    rollout_logprobs_N: Tensor  # of the engine, at sampling
    advantages_N: Tensor
    weights_N: Tensor  # what each token's loss counts in the whole update
    rows_N: Tensor  # int64
    ref_logprobs_N: Tensor | None = None  # of the reference; needed for a KL term


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The objective of each token, to be maximised."""

    objective_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor  # bool: the rule's bound changed the value


LossRule = Callable[[SampledTokens, AlgorithmConfig], Surrogate | Tensor]
"""An objective, or the loss of each token [N] to minimise."""


def as_surrogate(made: Any, tokens: SampledTokens) -> Surrogate:
    """The result of a rule. Raises `TypeError` or `ValueError` where it is not one value for each token."""
    if isinstance(made, Tensor):
        made = Surrogate(-made, ratios(tokens), torch.zeros_like(made, dtype=torch.bool))
    if not isinstance(made, Surrogate):
        raise TypeError(f"it returns {type(made).__name__}, not a tensor with the loss of each token")
    for values in (made.objective_N, made.ratio_N, made.clipped_N):
        if values.shape != tokens.logprobs_N.shape:
            raise ValueError(f"the loss has shape {list(values.shape)}, not {list(tokens.logprobs_N.shape)}")
    return made


def ratios(tokens: SampledTokens) -> Tensor:
    """The ratio [N] of each token, with its gradient."""
    return (tokens.logprobs_N - tokens.old_logprobs_N).clamp(max=MOST_LOG_RATIO).exp()


def clipped(tokens: SampledTokens, algorithm: AlgorithmConfig) -> Surrogate:
    """`clipped_surrogate` with the run's settings."""
    return clipped_surrogate(
        tokens.logprobs_N,
        tokens.old_logprobs_N,
        tokens.advantages_N,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )


def clipped_surrogate(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """PPO's objective with separate clips, min(ratio A, clip(ratio, 1 - low, 1 + high) A), per token.

    arXiv:2508.20722 Eq. 6 (clip-higher from DAPO, arXiv:2503.14476). `dual_clip` bounds the objective
    from below at `dual_clip * A` where A < 0 (arXiv:1912.09729 Eq. 5; above 1, or 0 for none).
    """
    ratio_N = (logprobs_N - old_logprobs_N).clamp(max=MOST_LOG_RATIO).exp()
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    objective_N = torch.minimum(plain_N, clipped_N)
    if dual_clip:
        objective_N = torch.where(advantages_N < 0, torch.maximum(objective_N, dual_clip * advantages_N), objective_N)
    return Surrogate(objective_N, ratio_N, (objective_N != plain_N).detach())


def gspo(tokens: SampledTokens, algorithm: AlgorithmConfig) -> Surrogate:
    """GSPO (arXiv:2507.18071 Eq. 5 to 7): as `clipped`, with one ratio for all tokens of a row.

    The ratio of a row is the geometric mean of its tokens' ratios. A token's gradient goes through its own log-prob
    (the paper's GSPO-token): the same where a row has one advantage and one weight, and right where each token has its
    own. With `--algorithm.normalisation sequence` the loss
    is the paper's; the clips that it uses are much narrower than PPO's (3e-4 and 4e-4).
    """
    log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
    of_row_N = row_sums(log_ratio_N, tokens.rows_N) / row_sums(torch.ones_like(log_ratio_N), tokens.rows_N)
    zero_N = tokens.logprobs_N - tokens.logprobs_N.detach()  # exactly, so that a row's ratios are equal bit for bit
    of_token_N = of_row_N.detach() + zero_N
    return clipped(replace(tokens, logprobs_N=of_token_N, old_logprobs_N=torch.zeros_like(of_row_N)), algorithm)


def cispo(tokens: SampledTokens, algorithm: AlgorithmConfig) -> Surrogate:
    """CISPO (arXiv:2506.13585 Eq. 4 and 5): min(ratio, 1 + clip_high) A log p, no gradient through the ratio.

    Every token keeps a gradient, however far its ratio moved. As in the paper's experiments, the ratio has no lower
    bound.
    """
    ratio_N = ratios(tokens).detach()
    capped_N = ratio_N.clamp(max=1 + algorithm.clip_high)
    return Surrogate(
        capped_N * tokens.advantages_N * tokens.logprobs_N, ratio_N, (capped_N != ratio_N) & (tokens.advantages_N != 0)
    )


def dppo(tokens: SampledTokens, algorithm: AlgorithmConfig) -> Surrogate:
    """DPPO with the binary total variation (arXiv:2602.04879): ratio A, without the tokens that have moved too far.

    A token counts for nothing where its probability has moved by more than `dppo_threshold` in the direction that its
    advantage asks for. A bound on the difference of probabilities, unlike one on their ratio, is not hard on rare
    tokens. The ratio is truncated at `DPPO_CAP` (section 5.4), where the gradient of log p remains.
    """
    ratio_N = ratios(tokens)
    with torch.no_grad():
        truncation_N = (DPPO_CAP / ratio_N).clamp(max=1.0)
        moved_N = tokens.logprobs_N.exp() - tokens.old_logprobs_N.exp()
        outside_N = moved_N * tokens.advantages_N.sign() > algorithm.dppo_threshold
    objective_N = torch.where(outside_N, torch.zeros_like(ratio_N), truncation_N * ratio_N * tokens.advantages_N)
    return Surrogate(objective_N, ratio_N, outside_N | ((truncation_N < 1) & (tokens.advantages_N != 0)))


DEVICE_FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
"""Errors that may appear first in a user's loss without being its fault: restarted ranks may succeed."""
LOSSES: dict[str, LossRule] = {"clipped": clipped, "gspo": gspo, "cispo": cispo, "dppo": dppo}
"""The built-in rules of `--algorithm.loss`."""


def row_sums(values_N: Tensor, rows_N: Tensor) -> Tensor:
    """[N]: for each token the sum over its row."""
    if len(values_N) == 0:
        return values_N
    sums_R = torch.zeros(int(rows_N.max()) + 1, dtype=values_N.dtype, device=values_N.device)
    return sums_R.index_add(0, rows_N, values_N)[rows_N]
