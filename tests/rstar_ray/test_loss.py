"""The learner's losses against plain references written out in float64, and against finite differences."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rstar_ray.algorithm.loss import (
    clipped_surrogate,
    k3_kl,
    likelihood_loss,
    policy_loss,
    rollout_correction,
    token_logprobs,
    token_weights,
)
from rstar_ray.algorithm.loss_settings import Correction, LossSettings, Normalisation, default_correction

LENGTHS = [5, 1, 7, 0, 3]
ROWS = [row for row, length in enumerate(LENGTHS) for _ in range(length)]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


# ---------------------------------------------------------------- log-probs in chunks


@pytest.mark.parametrize("chunk_tokens", [1, 3, 16, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_logprobs_and_entropy_are_those_of_a_full_softmax_with_their_gradients(
    chunk_tokens: int, temperature: float
):
    hidden, weight = draw(1, 16, 6).requires_grad_(), draw(2, 11, 6).requires_grad_()
    targets = torch.arange(16) % 11
    by_logprob, by_entropy = draw(3, 16), draw(4, 16)

    full = ((hidden @ weight.t()) / temperature).log_softmax(-1)
    want_logprobs, want_entropy = full.gather(-1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    want = torch.autograd.grad((want_logprobs * by_logprob + want_entropy * by_entropy).sum(), (hidden, weight))

    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_tokens=chunk_tokens, temperature=temperature)
    got = torch.autograd.grad((logprobs * by_logprob + entropy * by_entropy).sum(), (hidden, weight))
    torch.testing.assert_close(logprobs, want_logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_chunked_logprobs_pass_a_finite_difference_check():
    hidden, weight = draw(1, 5, 4).requires_grad_(), draw(2, 7, 4).requires_grad_()
    targets = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, chunk_tokens=2, temperature=0.8), (hidden, weight)
    )


def test_chunked_logprobs_of_no_token_are_empty_and_give_zero_gradients():
    hidden, weight = draw(1, 0, 4).requires_grad_(), draw(2, 7, 4).requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), chunk_tokens=8)
    (logprobs.sum() + entropy.sum()).backward()
    assert len(logprobs) == 0 and not weight.grad.any()


def test_bfloat16_inputs_give_float32_logprobs_close_to_float32s():
    hidden, weight = draw(1, 64, 32, dtype=torch.float32), draw(2, 50, 32, dtype=torch.float32)
    targets = torch.arange(64) % 50
    want, _ = token_logprobs(hidden, weight, targets, chunk_tokens=16)
    got, _ = token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, chunk_tokens=16)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.15


def test_the_gradient_does_not_depend_on_the_chunk_in_float32():
    hidden, weight = draw(1, 300, 16, dtype=torch.float32), draw(2, 50, 16, dtype=torch.float32)
    targets = torch.arange(300) % 50
    gradients = []
    for chunk_tokens in (7, 64, 300):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        token_logprobs(*leaves, targets, chunk_tokens=chunk_tokens)[0].mean().backward()
        gradients.append(torch.cat([leaf.grad.flatten() for leaf in leaves]))
    for one, other in pairwise(gradients):
        assert (one - other).abs().max() < 1e-6


# ---------------------------------------------------------------- the surrogate and its normalisation


def reference_loss(logprobs, old, advantages, settings: LossSettings, rollout=None, ref=None, entropy=None) -> float:
    """arXiv:2508.20722 Eq. 6 and its variants, one token at a time, in Python floats."""
    rows: dict[int, list[float]] = {}
    for i, row in enumerate(ROWS):
        ratio = math.exp(logprobs[i] - old[i])
        clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
        objective = min(ratio * advantages[i], clipped * advantages[i])
        if settings.dual_clip is not None and advantages[i] < 0:
            objective = max(objective, settings.dual_clip * advantages[i])
        weight = 1.0
        if settings.correction is not Correction.NONE:
            weight = math.exp(old[i] - rollout[i])
            if settings.correction is Correction.SEQUENCE:
                weight = math.exp(sum(old[j] - rollout[j] for j, other in enumerate(ROWS) if other == row))
            inside = settings.correction_low <= weight <= settings.correction_cap
            if settings.correction is Correction.ICEPOP:
                weight = weight if inside else 0.0
            else:
                weight = min(weight, settings.correction_cap)
        loss = -weight * objective - settings.entropy_coefficient * (entropy[i] if entropy is not None else 0.0)
        if settings.kl_coefficient:
            log_ratio = ref[i] - logprobs[i]
            loss += settings.kl_coefficient * (math.exp(log_ratio) - log_ratio - 1)
        rows.setdefault(row, []).append(loss)
    if settings.normalisation is Normalisation.TOKEN:
        return sum(sum(row) for row in rows.values()) / len(ROWS)
    if settings.normalisation is Normalisation.SEQUENCE:
        return sum(sum(row) / len(row) for row in rows.values()) / len(rows)
    return sum(sum(row) / settings.constant_tokens for row in rows.values()) / len(rows)


def our_loss(logprobs, old, advantages, settings: LossSettings, rollout=None, ref=None, entropy=None):
    lengths = torch.tensor(LENGTHS)
    token = settings.normalisation is Normalisation.TOKEN
    count = int(lengths.sum()) if token else int((lengths > 0).sum())
    weights = token_weights(lengths, settings.normalisation, count=count, constant=settings.constant_tokens)
    rows = torch.tensor(ROWS)
    zero = torch.zeros_like(logprobs)
    return policy_loss(
        logprobs,
        zero if entropy is None else entropy,
        old,
        zero if rollout is None else rollout,
        advantages,
        weights.double()[rows],
        rows,
        settings,
        ref,
    )


VARIANTS = [
    LossSettings(),
    LossSettings(normalisation=Normalisation.SEQUENCE),
    LossSettings(normalisation=Normalisation.CONSTANT, constant_tokens=9),
    LossSettings(dual_clip=1.5, clip_low=0.1, clip_high=0.4),
    LossSettings(entropy_coefficient=0.3),
    LossSettings(kl_coefficient=0.2),
    LossSettings(correction=Correction.TOKEN, correction_cap=1.3),
    LossSettings(correction=Correction.SEQUENCE, correction_cap=1.5, normalisation=Normalisation.SEQUENCE),
    LossSettings(correction=Correction.ICEPOP, correction_low=0.7, correction_cap=1.4),
]


def drawn(seed: int) -> dict[str, Tensor]:
    count = len(ROWS)
    advantages = draw(seed + 2, len(LENGTHS))[torch.tensor(ROWS)]
    base = draw(seed, count) - 3
    return {
        "logprobs": base,
        "old": base + 0.3 * draw(seed + 1, count),
        "advantages": advantages,
        "rollout": base + 0.3 * draw(seed + 3, count),
        "ref": base + 0.3 * draw(seed + 4, count),
        "entropy": draw(seed + 5, count).abs(),
    }


@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("seed", range(5))
def test_the_policy_loss_is_the_reference_written_out_token_by_token(settings: LossSettings, seed: int):
    tensors = drawn(100 * seed)
    got, _ = our_loss(**tensors, settings=settings)
    want = reference_loss(**{name: tensor.tolist() for name, tensor in tensors.items()}, settings=settings)
    # The weights are float32 before they meet float64 log-probs.
    assert float(got) == pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize("settings", VARIANTS)
def test_the_gradient_is_the_finite_difference_of_the_reference(settings: LossSettings):
    tensors = drawn(7)
    logprobs = tensors["logprobs"].clone().requires_grad_()
    our_loss(**{**tensors, "logprobs": logprobs}, settings=settings)[0].backward()
    plain = {name: tensor.tolist() for name, tensor in tensors.items()}
    step = 1e-6
    for i in range(len(ROWS)):
        high, low = list(plain["logprobs"]), list(plain["logprobs"])
        high[i] += step
        low[i] -= step
        rise = reference_loss(**{**plain, "logprobs": high}, settings=settings)
        rise -= reference_loss(**{**plain, "logprobs": low}, settings=settings)
        assert float(logprobs.grad[i]) == pytest.approx(rise / (2 * step), abs=1e-6)


def test_no_gradient_flows_where_the_clip_binds_and_it_does_on_the_other_side():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    logprobs = ratios.log().requires_grad_()
    surrogate = clipped_surrogate(logprobs, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.28)
    surrogate.objective_N.sum().backward()
    assert surrogate.clipped_N.tolist() == [True, False, False, True]
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.5, 0.5, 0.0])


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    surrogate = clipped_surrogate(
        torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    assert surrogate.objective_N.tolist() == [-3.0]


def test_a_ratio_of_exactly_one_gives_the_policy_gradient_itself():
    logprobs = draw(1, 4).requires_grad_()
    advantages = draw(2, 4)
    clipped_surrogate(
        logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.28
    ).objective_N.sum().backward()
    torch.testing.assert_close(logprobs.grad, advantages)


def test_k3_is_never_negative_zero_only_where_the_policies_agree_and_unbiased():
    policy, reference = (draw(seed, 200).log_softmax(-1) for seed in (1, 2))
    assert (k3_kl(policy, reference) >= 0).all()
    assert not k3_kl(policy, policy).any()
    true = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * k3_kl(policy, reference)).sum(), true)


@pytest.mark.parametrize("mode", [Correction.TOKEN, Correction.SEQUENCE, Correction.ICEPOP])
def test_where_engine_and_learner_agree_the_correction_is_one(mode: Correction):
    logprobs = draw(1, len(ROWS))
    assert (rollout_correction(logprobs, logprobs, torch.tensor(ROWS), mode) == 1).all()


def test_the_correction_carries_no_gradient():
    old = draw(1, len(ROWS)).requires_grad_()
    weights = rollout_correction(old, draw(2, len(ROWS)), torch.tensor(ROWS), Correction.TOKEN)
    assert not weights.requires_grad


def test_every_token_weight_sums_to_what_its_normalisation_says():
    lengths = torch.tensor([4, 1, 5])
    token = token_weights(lengths, Normalisation.TOKEN, count=10)
    sequence = token_weights(lengths, Normalisation.SEQUENCE, count=3)
    constant = token_weights(lengths, Normalisation.CONSTANT, count=3, constant=8)
    assert float((token * lengths).sum()) == pytest.approx(1.0)
    assert (sequence * lengths).tolist() == pytest.approx([1 / 3] * 3)
    assert constant.tolist() == pytest.approx([1 / 24] * 3)


def test_the_statistics_are_sums_that_add_up_over_any_split():
    tensors, settings = drawn(3), LossSettings(correction=Correction.TOKEN)
    _, whole = our_loss(**tensors, settings=settings)
    rows = torch.tensor(ROWS)
    weights = token_weights(torch.tensor(LENGTHS), settings.normalisation, count=len(ROWS)).double()[rows]
    parts = []
    for part in (rows < 2, rows >= 2):
        cut = {name: tensor[part] for name, tensor in tensors.items()}
        parts.append(
            policy_loss(
                cut["logprobs"], cut["entropy"], cut["old"], cut["rollout"], cut["advantages"],
                weights[part], rows[part], settings, cut["ref"],
            )[1]
        )  # fmt: skip
    torch.testing.assert_close(parts[0].sums + parts[1].sums, whole.sums)
    torch.testing.assert_close(torch.maximum(parts[0].maxima, parts[1].maxima), whole.maxima)


def test_cross_entropy_is_torchs_own():
    logits = draw(1, 9, 5)
    targets = torch.arange(9) % 5
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    loss, stats = likelihood_loss(logprobs, torch.zeros(9), torch.full((9,), 1 / 9).double())
    assert float(loss) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets)), abs=1e-7)
    assert float(stats.sums[0]) == float(loss)


def test_precisions_that_differ_are_corrected_unless_told_otherwise():
    assert default_correction("float32", "float32") is Correction.NONE
    assert default_correction("bfloat16", "float32") is Correction.TOKEN


@pytest.mark.parametrize(
    "wrong",
    [
        {"dual_clip": 1.0},
        {"dual_clip": math.nan},
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"clip_low": -1.0},
        {"clip_low": 1.0},
        {"clip_high": -0.5},
        {"clip_high": math.inf},
        {"constant_tokens": 0},
        {"entropy_coefficient": math.nan},
        {"kl_coefficient": -1.0},
        {"correction_cap": 0.0},
        {"correction_low": 3.0},
        {"correction_low": -0.1},
        {"normalisation": "bogus"},
        {"correction": "bogus"},
    ],
)
def test_settings_without_a_meaning_are_refused(wrong: dict[str, Any]):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be"):
        LossSettings(**wrong)


def test_a_kl_term_needs_the_references_logprobs():
    some, rows = torch.zeros(1), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="no ref_logprobs"):
        policy_loss(some, some, some, some, some, some, rows, LossSettings(kl_coefficient=0.5))


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_token_that_became_vastly_likelier_gives_finite_losses_and_gradients(advantage: float):
    logprobs = torch.tensor([-0.1], requires_grad=True)
    reference = torch.tensor([200.0])  # no log-prob, but as far off as one could be
    zeros = torch.zeros(1)
    loss, stats = policy_loss(
        logprobs, zeros, torch.tensor([-200.0]), torch.tensor([-200.0]), torch.full((1,), advantage), torch.ones(1),
        torch.zeros(1, dtype=torch.long), LossSettings(kl_coefficient=0.1), reference,
    )  # fmt: skip
    loss.backward()
    assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert stats.sums.isfinite().all() and stats.maxima.isfinite().all()
