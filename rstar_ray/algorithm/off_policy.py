"""Training on tokens that another policy sampled: `--algorithm.correction`, and how far the two policies are apart.

Tokens are sampled by an engine. Its kernels are not the learner's, and with `--staleness` its weights are older.
Legend: N sampled tokens of a micro batch, rows laid end to end; R rows (trajectories); w = exp(old_logprobs -
rollout_logprobs), the learner before the update over the sampler.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rstar_ray.algorithm.surrogate import MOST_LOG_RATIO, SampledTokens, row_sums
from rstar_ray.config import AlgorithmConfig


def corrected(tokens: SampledTokens, algorithm: AlgorithmConfig) -> tuple[SampledTokens, Tensor]:
    """The tokens as the loss rule reads them, and the weight [N] of each token's objective. No gradient in the weights.

    | correction | old policy of the rule's ratio | weight |
    |---|---|---|
    | none | the learner before the update | 1 |
    | sampler | the sampler (arXiv:2508.20722 Eq. 6, as it is written) | 1 |
    | token | the learner before the update | min(w, cap), truncated importance sampling |
    | sequence | the learner before the update | min(product of w over the row, cap) |
    | icepop | the learner before the update | w where low <= w <= high, else 0 (arXiv:2510.18855) |

    With one update per step the learner before the update is the policy itself: its ratio is 1 and its clip is inert.
    Only `sampler` then bounds how far the policy may move from the tokens' sampler.
    """
    assert algorithm.correction != "auto", "`RunConfig.loss` has it resolved"
    if algorithm.correction == "sampler":
        return replace(tokens, old_logprobs_N=tokens.rollout_logprobs_N), torch.ones_like(tokens.rollout_logprobs_N)
    log_w_N = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).detach()
    if algorithm.correction == "none":
        return tokens, torch.ones_like(log_w_N)
    if algorithm.correction == "sequence":
        log_w_N = row_sums(log_w_N, tokens.rows_N)
    w_N = log_w_N.exp()
    if algorithm.correction == "icepop":
        inside_N = (w_N >= algorithm.correction_low) & (w_N <= algorithm.correction_high)
        return tokens, torch.where(inside_N, w_N, torch.zeros_like(w_N))
    return tokens, w_N.clamp(max=algorithm.correction_cap)


def k3_kl(logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(p || ref) per token that p sampled: never negative, unbiased."""
    log_ratio_N = (ref_logprobs_N - logprobs_N).clamp(max=MOST_LOG_RATIO)
    return log_ratio_N.exp() - log_ratio_N - 1


MOST_LOG_WEIGHT = 300.0
"""Bound of a log weight in these sums, so that its square fits float64."""


def weight_moments(log_w_N: Tensor, rows_N: Tensor) -> Tensor:
    """Float64 [6]: number, sum and sum of squares of the tokens' weights w, then of the rows' weights.

    A row's weight is the product of its tokens'. Moments of several micro batches add up.
    """
    log_w_N = log_w_N.double()
    first_N = torch.ones_like(rows_N, dtype=torch.bool)
    first_N[1:] = rows_N[1:] != rows_N[:-1]
    log_w_R = row_sums(log_w_N, rows_N)[first_N]
    return torch.cat([_moments(log_w_N), _moments(log_w_R)])


def _moments(log_w: Tensor) -> Tensor:
    w = log_w.clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT).exp()
    return torch.stack([torch.full_like(w.sum(), len(w)), w.sum(), w.square().sum()])


def effective_sample_size(number: float, total: float, squares: float) -> float:
    """(sum w)^2 / (n sum w^2) in (0, 1]: the share of n samples that as many equally weighted ones would be worth.

    Kish, Survey Sampling (1965). 1 where there is no sample.

    >>> effective_sample_size(2, 4.0, 16.0)
    0.5
    """
    return total**2 / (number * squares) if number and squares else 1.0
