"""Losses of the learner as pure functions of tensors.

Legend: N sampled tokens of a micro batch, rows of different lengths laid end to end without padding;
R rows (trajectories); H hidden size; V vocabulary. `rows_N` names the row of each token.

A loss is always `sum(weights_N * per_token_N)`; the weights are those of the whole update (`normalisation`).
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rstar_ray.algorithm.off_policy import corrected, k3_kl
from rstar_ray.algorithm.surrogate import LossRule, SampledTokens, Surrogate, as_surrogate, clipped
from rstar_ray.config import AlgorithmConfig

# ---------------------------------------------------------------- log-probs without the [N, V] matrix


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    chunk_tokens: int,
    temperature: float,
    float32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of its distribution in nats: two float32 [N].

    Forward and backward hold the logits of `chunk_tokens` tokens at a time and nothing of size
    [N, V]; the backward pass computes each chunk's logits again, where there is more than one
    chunk. Both outputs are differentiable.
    Float64 inputs stay float64. `float32_head` leaves the logits of bfloat16 inputs unrounded; the
    backward pass multiplies in the inputs' type either way.
    """
    head = _Head(temperature, float32=float32_head)
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(hidden_NH, weight_VH, targets_N, chunk_tokens, head)
    return logprobs_N, entropy_N


@dataclass(frozen=True, slots=True)
class _Head:
    """How hidden states become logits, in the same way as in the engine."""

    temperature: float
    float32: bool

    def logits(self, hidden: Tensor, weight_VH: Tensor) -> Tensor:
        """[chunk, V] in at least float32: of a product in the inputs' type, or in float32."""
        logits = _float32_product(hidden, weight_VH.t()) if self.float32 else hidden @ weight_VH.t()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if self.temperature == 1.0 else logits / self.temperature


def _float32_product(one: Tensor, other: Tensor) -> Tensor:
    """The product of two matrices, accumulated and returned in at least float32.

    GPUs multiply bfloat16 matrices so without float32 copies of them (vLLM's `LogitsProcessor` does the same).
    """
    if one.dtype in (torch.float32, torch.float64):
        return one @ other
    if one.is_cuda:
        return torch.mm(one, other, out_dtype=torch.float32)
    return one.float() @ other.float()


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, chunk_tokens: int, head: _Head
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        logprobs_N = torch.empty(len(targets_N), dtype=dtype, device=hidden_NH.device)
        entropy_N, normaliser_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        kept = None
        for start in range(0, len(targets_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = head.logits(hidden_NH[chunk], weight_VH)
            normaliser_N[chunk] = normaliser = logits.logsumexp(-1)
            logits -= normaliser[:, None]  # now log-probabilities
            logprobs_N[chunk] = logits.gather(-1, targets_N[chunk, None])[:, 0]
            entropy_N[chunk] = -logits.exp().mul_(logits).sum(-1)
            if len(targets_N) <= chunk_tokens:
                kept = logits
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, normaliser_N, entropy_N, kept)
        ctx.chunk_tokens, ctx.head = chunk_tokens, head
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        logprob_grads_N, entropy_grads_N = grad_outputs
        hidden_NH, weight_VH, targets_N, normaliser_N, entropy_N, kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grads_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        # Accumulated over chunks, so in at least float32 whatever the weight's own type.
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=normaliser_N.dtype) if needs_weight else None
        if logprob_grads_N is None and entropy_grads_N is None:
            return hidden_grads_NH, weight_grad_VH, None, None, None
        for start in range(0, len(targets_N), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            hidden = hidden_NH[chunk]
            log_probs = kept
            if log_probs is None:
                log_probs = ctx.head.logits(hidden, weight_VH)
                log_probs -= normaliser_N[chunk, None]
            # d logprob_t / d logit_v = [v = t] - p_v ;  d H / d logit_v = -p_v (log p_v + H)
            grad_logits = log_probs.exp().neg_()
            of_target = None if logprob_grads_N is None else logprob_grads_N[chunk, None]
            if entropy_grads_N is None:
                scale = of_target
            else:
                scale = (log_probs + entropy_N[chunk, None]).mul_(entropy_grads_N[chunk, None])
                if of_target is not None:
                    scale += of_target
            grad_logits *= scale
            del log_probs, scale  # or they would lie beside the next chunk's
            if of_target is not None:
                grad_logits.scatter_add_(-1, targets_N[chunk, None], of_target)
            if ctx.head.temperature != 1.0:
                grad_logits /= ctx.head.temperature
            grad_logits = grad_logits.to(hidden.dtype)
            if hidden_grads_NH is not None:
                torch.mm(grad_logits, weight_VH, out=hidden_grads_NH[chunk])
            if weight_grad_VH is not None:
                if weight_grad_VH.dtype == hidden.dtype:
                    weight_grad_VH.addmm_(grad_logits.t(), hidden)
                else:
                    weight_grad_VH += grad_logits.t() @ hidden
            del grad_logits
        if weight_grad_VH is not None:
            weight_grad_VH = weight_grad_VH.to(weight_VH.dtype)
        return hidden_grads_NH, weight_grad_VH, None, None, None


# ---------------------------------------------------------------- the whole loss of a micro batch


LossStats = dict[str, Tensor]
"""Statistics of a micro batch as float64 scalars, named as in rstar_ray/telemetry/registry.py.

Metrics with the reduction `mean` are sums over the tokens here; the caller divides by the tokens of the whole
update.
"""


def policy_loss(
    tokens: SampledTokens, algorithm: AlgorithmConfig, rule: LossRule = clipped
) -> tuple[Tensor, LossStats]:
    """The loss to minimise and its statistics; `rule` is the objective of each token.

    Raises `ValueError` for a KL term without the reference's log-probs, and for a rule that gives no loss per
    token.
    """
    if algorithm.kl_coefficient and tokens.ref_logprobs_N is None:
        raise ValueError(f"kl_coefficient is {algorithm.kl_coefficient}, but there are no ref_logprobs")
    read, correction_N = corrected(tokens, algorithm)
    if not len(tokens.logprobs_N):  # a rank without rows takes part in the pass; reductions of a rule may fail on them
        rule = clipped
    surrogate = as_surrogate(rule(read, algorithm), read)
    per_token_N = -correction_N * surrogate.objective_N
    if algorithm.entropy_coefficient:
        per_token_N = per_token_N - algorithm.entropy_coefficient * tokens.entropy_N
    reference_N = tokens.ref_logprobs_N
    kl_N = torch.zeros_like(per_token_N) if reference_N is None else k3_kl(tokens.logprobs_N, reference_N)
    if algorithm.kl_coefficient:
        per_token_N = per_token_N + algorithm.kl_coefficient * kl_N
    loss = (tokens.weights_N * per_token_N).sum()
    if not per_token_N.requires_grad:  # a rule may give a constant for these tokens; the backward pass needs a graph
        loss = loss + 0.0 * tokens.logprobs_N.sum()
    with torch.no_grad():
        gap_N = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).abs()
        positive_N = tokens.advantages_N > 0
        stats = {
            "entropy": tokens.entropy_N.double().sum(),
            "clip_frac": surrogate.clipped_N.double().sum(),
            "clip_frac_positive": (surrogate.clipped_N & positive_N).double().sum(),
            "clip_frac_negative": (surrogate.clipped_N & ~positive_N).double().sum(),
            "kl_sampler": k3_kl(tokens.rollout_logprobs_N, tokens.old_logprobs_N).double().sum(),
            "ratio_mean": surrogate.ratio_N.double().sum(),
            "logprob_diff_mean": gap_N.double().sum(),
            "correction_mean": correction_N.double().sum(),
            "ratio_max": _largest(surrogate.ratio_N),
            "logprob_diff_max": _largest(gap_N),
        }
        if reference_N is not None:
            stats["kl"] = kl_N.double().sum()
    return loss, stats


def try_rule(rule: LossRule, algorithm: AlgorithmConfig, device: torch.device | str = "cpu") -> None:
    """Run a rule on made-up micro batches, forward and backward. Raises whatever the rule raises, and `ValueError`.

    Each has two rows of different length and advantages of both signs, of one sign, or of 0. Some tokens have a ratio
    of 1, as all tokens have in the first update of a step.
    """
    alone = replace(algorithm, correction="none", kl_coefficient=0.0, entropy_coefficient=0.0)
    given = replace(algorithm, correction="none")  # a rule may read the coefficients

    def called(tokens: SampledTokens, _: AlgorithmConfig) -> Surrogate | Tensor:
        return rule(tokens, given)

    for first, second in ((2.0, -1.0), (1.0, 0.5), (-0.5, -1.0), (0.0, 0.0)):
        gradient_N = _gradient_of(called, alone, torch.tensor([first] * 3 + [second] * 2, device=device))
        if first > 0 > second and not gradient_N.any():
            raise ValueError("its gradient is 0 for every token: it must depend on `logprobs_N`, without detach()")


def _gradient_of(rule: LossRule, algorithm: AlgorithmConfig, advantages_N: Tensor) -> Tensor:
    """The gradient of the loss by the log-probs of made-up tokens. Raises `ValueError` unless a second call repeats it,
    and where the rule changes its inputs.
    """
    device = advantages_N.device
    logprobs_N = torch.tensor([-0.05, -1.0, -3.0, -0.4, -2.0], device=device)
    old_N = logprobs_N - torch.tensor([0.1, 0.0, 0.3, 0.1, 0.0], device=device)
    made: list[Tensor] = []
    for _ in range(2):
        tokens = SampledTokens(
            logprobs_N=logprobs_N.clone().requires_grad_(),
            entropy_N=torch.tensor([0.1, 1.0, 2.0, 0.5, 1.5], device=device),
            old_logprobs_N=old_N.clone(),
            rollout_logprobs_N=old_N.clone(),
            advantages_N=advantages_N.clone(),
            weights_N=torch.full((5,), 0.2, device=device),
            rows_N=torch.tensor([0, 0, 0, 1, 1], device=device),
            ref_logprobs_N=logprobs_N - 0.2 if algorithm.reference_model else None,
        )
        before = {name: value.detach().clone() for name, value in _tensors(tokens)}
        loss, _ = policy_loss(tokens, algorithm, rule)
        for name, value in _tensors(tokens):
            if not torch.equal(value, before[name]):
                raise ValueError(f"it changes `{name}` in place: a rule must leave its inputs as they are")
        loss.backward()
        gradient_N = tokens.logprobs_N.grad
        if gradient_N is None:
            raise ValueError("its gradient does not reach `logprobs_N`")
        if not torch.isfinite(loss) or not torch.isfinite(gradient_N).all():
            given = f"advantages of {', '.join(f'{one:g}' for one in advantages_N.tolist())}"
            raise ValueError(f"the loss or its gradient is not finite: {loss.item()}, with {given}")
        made += [torch.cat([loss.detach()[None], gradient_N])]
    # The order of sums is not fixed on a GPU.
    same = torch.equal(*made) if device.type == "cpu" else torch.allclose(*made, rtol=1e-3)
    if not same:
        raise ValueError("a second call with the same tokens gives another loss or gradient")
    return made[0][1:]


def _tensors(tokens: SampledTokens) -> list[tuple[str, Tensor]]:
    found = [(field.name, getattr(tokens, field.name)) for field in fields(tokens)]
    return [(name, value) for name, value in found if value is not None]


def likelihood_loss(logprobs_N: Tensor, entropy_N: Tensor, weights_N: Tensor) -> tuple[Tensor, LossStats]:
    """Cross-entropy on the tokens with a loss (SFT)."""
    loss = -(weights_N * logprobs_N).sum()
    with torch.no_grad():
        return loss, {"entropy": entropy_N.double().sum()}


def _largest(values_N: Tensor) -> Tensor:
    return values_N.double().max() if len(values_N) else torch.zeros((), dtype=torch.float64, device=values_N.device)
