"""The learner's losses against plain references written out in float64, and against finite differences."""

import math
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rstar_ray.algorithm.loss import likelihood_loss, policy_loss, token_logprobs
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.off_policy import corrected, effective_sample_size, k3_kl, weight_moments
from rstar_ray.algorithm.surrogate import LOSSES, SampledTokens, clipped_surrogate
from rstar_ray.config import AlgorithmConfig, RunConfig, with_values
from rstar_ray.errors import ConfigError
from rstar_ray.telemetry.registry import Reduction, combined, step_metric
from tests import derived

CONSTANT_TOKENS = 9
LENGTHS = [5, 1, 7, 0, 3]
GROUPS = ["a", "a", "b", "c", "d"]
ROWS = [row for row, length in enumerate(LENGTHS) for _ in range(length)]


def sampled(logprobs_N: Tensor, **given: Tensor) -> SampledTokens:
    """Tokens of one row; what is not given is one, but the old log-probs, which are the policy's and the engine's."""
    old_N, ones_N = given.get("old_logprobs_N", logprobs_N.detach()), torch.ones_like(logprobs_N.detach())
    tokens = SampledTokens(
        logprobs_N=logprobs_N, entropy_N=ones_N, old_logprobs_N=old_N, rollout_logprobs_N=old_N, advantages_N=ones_N,
        weights_N=ones_N, rows_N=torch.zeros(len(ones_N), dtype=torch.long),
    )  # fmt: skip
    return replace(tokens, **given)


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


@pytest.mark.parametrize("chunk_tokens", [16, 64])  # the backward pass computes logits again, or keeps them
def test_a_float32_head_rounds_no_logit_of_bfloat16_inputs(chunk_tokens: int):
    hidden, weight = draw(1, 64, 32).bfloat16(), draw(2, 50, 32).bfloat16()
    targets = torch.arange(64) % 50

    def with_gradients(one: Tensor, other: Tensor, **head: bool) -> tuple[Tensor, Tensor, Tensor]:
        leaves = one.clone().requires_grad_(), other.clone().requires_grad_()
        found = token_logprobs(*leaves, targets, chunk_tokens=chunk_tokens, temperature=0.9, **head)[0]
        found.sum().backward()
        return found.detach(), leaves[0].grad, leaves[1].grad

    exact = with_gradients(hidden.double(), weight.double())
    float32 = with_gradients(hidden, weight, float32_head=True)
    rounded = with_gradients(hidden, weight)
    assert (float32[0] - exact[0]).abs().max() < 1e-5
    assert (rounded[0] - exact[0]).abs().max() > 1e-3
    for ours, theirs in zip(float32[1:], exact[1:], strict=True):
        assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


# ---------------------------------------------------------------- the surrogate and its normalisation


def reference_loss(
    *, logprobs, old, advantages, settings: AlgorithmConfig, rollout=None, ref=None, entropy=None
) -> float:
    """arXiv:2508.20722 Eq. 6 and its variants, one token at a time, in Python floats."""
    rows: dict[int, list[float]] = {}
    old = rollout if settings.correction == "sampler" else old
    for i, row in enumerate(ROWS):
        ratio = math.exp(logprobs[i] - old[i])
        if settings.loss == "gspo":
            own = [j for j, other in enumerate(ROWS) if other == row]
            ratio = math.exp(sum(logprobs[j] - old[j] for j in own) / len(own))
        clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
        objective = min(ratio * advantages[i], clipped * advantages[i])
        if settings.dual_clip and advantages[i] < 0:
            objective = max(objective, settings.dual_clip * advantages[i])
        if settings.loss == "dppo":
            moved = (math.exp(logprobs[i]) - math.exp(old[i])) * math.copysign(1, advantages[i])
            objective = 0.0 if moved > settings.dppo_threshold else min(ratio, 20.0) * advantages[i]
        weight = 1.0
        if settings.correction not in ("none", "sampler"):
            weight = math.exp(old[i] - rollout[i])
            if settings.correction == "sequence":
                weight = math.exp(sum(old[j] - rollout[j] for j, other in enumerate(ROWS) if other == row))
            inside = settings.correction_low <= weight <= settings.correction_high
            if settings.correction == "icepop":
                weight = weight if inside else 0.0
            else:
                weight = min(weight, settings.correction_cap)
        loss = -weight * objective - settings.entropy_coefficient * (entropy[i] if entropy is not None else 0.0)
        if settings.kl_coefficient:
            log_ratio = ref[i] - logprobs[i]
            loss += settings.kl_coefficient * (math.exp(log_ratio) - log_ratio - 1)
        rows.setdefault(row, []).append(loss)
    if settings.normalisation == "token":
        return sum(sum(row) for row in rows.values()) / len(ROWS)
    if settings.normalisation == "sequence":
        return sum(sum(row) / len(row) for row in rows.values()) / len(rows)
    if settings.normalisation == "group":
        groups: dict[str, list[float]] = {}
        for row, losses in rows.items():
            groups.setdefault(GROUPS[row], []).extend(losses)
        return sum(sum(losses) / len(losses) for losses in groups.values()) / len(groups)
    return sum(sum(row) / CONSTANT_TOKENS for row in rows.values()) / len(rows)


def sampled_tokens(tensors: dict[str, Tensor], settings: AlgorithmConfig) -> SampledTokens:
    """Each row a separate group but the first two, which share one."""
    weights = token_weights(LENGTHS, GROUPS, settings.normalisation, constant_tokens=CONSTANT_TOKENS)
    rows = torch.tensor(ROWS)
    return SampledTokens(
        logprobs_N=tensors["logprobs"],
        entropy_N=tensors["entropy"],
        old_logprobs_N=tensors["old"],
        rollout_logprobs_N=tensors["rollout"],
        advantages_N=tensors["advantages"],
        weights_N=torch.tensor(weights, dtype=torch.float64)[rows],
        rows_N=rows,
        ref_logprobs_N=tensors["ref"],
    )


VARIANTS = [
    derived.loss(),
    derived.loss(normalisation="group"),
    derived.loss(normalisation="sequence"),
    derived.loss(normalisation="constant"),
    derived.loss(dual_clip=1.5, clip_low=0.1, clip_high=0.4),
    derived.loss(entropy_coefficient=0.3),
    derived.loss(kl_coefficient=0.2),
    derived.loss(correction="token", correction_cap=1.3),
    derived.loss(correction="sequence", correction_cap=1.5, normalisation="sequence"),
    derived.loss(correction="icepop", correction_low=0.7, correction_high=1.4),
    derived.loss(correction="sampler", dual_clip=1.5),
    derived.loss(loss="gspo", normalisation="sequence", clip_low=0.1, clip_high=0.1),
    derived.loss(loss="gspo", correction="sampler"),
    derived.loss(loss="dppo", correction="sampler", dppo_threshold=0.01),
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
def test_the_policy_loss_is_the_reference_written_out_token_by_token(settings: AlgorithmConfig, seed: int):
    tensors = drawn(100 * seed)
    got, _ = policy_loss(sampled_tokens(tensors, settings), settings, LOSSES[settings.loss])
    want = reference_loss(**{name: tensor.tolist() for name, tensor in tensors.items()}, settings=settings)
    assert float(got) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("settings", VARIANTS)
def test_the_gradient_is_the_finite_difference_of_the_reference(settings: AlgorithmConfig):
    tensors = drawn(7)
    logprobs = tensors["logprobs"].clone().requires_grad_()
    tokens = sampled_tokens({**tensors, "logprobs": logprobs}, settings)
    policy_loss(tokens, settings, LOSSES[settings.loss])[0].backward()
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


def test_k3_is_never_negative_zero_only_where_the_policies_agree_and_unbiased():
    policy, reference = (draw(seed, 200).log_softmax(-1) for seed in (1, 2))
    assert (k3_kl(policy, reference) >= 0).all()
    assert not k3_kl(policy, policy).any()
    true = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * k3_kl(policy, reference)).sum(), true)


@pytest.mark.parametrize("correction", ["token", "sequence", "icepop"])
def test_where_engine_and_learner_agree_the_weight_is_one_and_it_never_carries_a_gradient(correction: str):
    tensors, settings = drawn(5), derived.loss(correction=correction)
    agreed = sampled_tokens({**tensors, "rollout": tensors["old"]}, settings)
    assert (corrected(agreed, settings)[1] == 1).all()
    differing = sampled_tokens({**tensors, "old": tensors["old"].requires_grad_()}, settings)
    assert not corrected(differing, settings)[1].requires_grad


@pytest.mark.parametrize("correction", ["sampler", "token", "icepop"])
def test_with_one_update_a_correction_weighs_the_policy_gradient_by_the_ratio_to_the_sampler(correction: str):
    """Where no bound is reached, the gradient is w A grad log p, whatever the correction."""
    tensors = drawn(5)
    logprobs = tensors["logprobs"].clone().requires_grad_()
    sampler = logprobs.detach() + 0.01 * draw(9, len(ROWS))
    tensors |= {"logprobs": logprobs, "old": logprobs.detach(), "rollout": sampler}
    settings = derived.loss(correction=correction)
    policy_loss(sampled_tokens(tensors, settings), settings)[0].backward()
    want = -(logprobs.detach() - sampler).exp() * tensors["advantages"] / len(ROWS)
    torch.testing.assert_close(logprobs.grad, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("correction", ["none", "sampler", "token", "icepop"])
def test_gspo_weighs_each_tokens_gradient_by_its_own_advantage_and_weight(correction: str):
    """GSPO-token of arXiv:2507.18071: the gradient is w s A grad log p, with the ratio s of the row."""
    tensors = drawn(5) | {"advantages": draw(11, len(ROWS))}
    logprobs = tensors["logprobs"].clone().requires_grad_()
    settings = derived.loss(
        loss="gspo", correction=correction, clip_low=0.9, clip_high=9.0, correction_low=0.8, correction_cap=9.0
    )
    policy_loss(sampled_tokens({**tensors, "logprobs": logprobs}, settings), settings, LOSSES["gspo"])[0].backward()
    old = tensors["rollout" if correction == "sampler" else "old"]
    weight = (tensors["old"] - tensors["rollout"]).exp() if correction in ("token", "icepop") else torch.ones(len(ROWS))
    if correction == "icepop":
        weight = torch.where((weight < 0.8) | (weight > settings.correction_high), 0.0, weight)
    for i, row in enumerate(ROWS):
        ratio = math.exp(mean(float(tensors["logprobs"][j] - old[j]) for j, of in enumerate(ROWS) if of == row))
        want = -float(weight[i]) * ratio * float(tensors["advantages"][i]) / len(ROWS)
        assert float(logprobs.grad[i]) == pytest.approx(want, abs=1e-12)


def test_cispo_keeps_the_gradient_of_a_token_beyond_its_cap():
    """arXiv:2506.13585 Eq. 4: the gradient is min(ratio, 1 + clip_high) A grad log p."""
    tensors = drawn(5)
    logprobs = tensors["logprobs"].clone().requires_grad_()
    settings = derived.loss(loss="cispo", clip_high=0.1)
    policy_loss(sampled_tokens({**tensors, "logprobs": logprobs}, settings), settings, LOSSES["cispo"])[0].backward()
    ratios = (logprobs.detach() - tensors["old"]).exp()
    assert (ratios > 1.1).any()
    torch.testing.assert_close(logprobs.grad, -ratios.clamp(max=1.1) * tensors["advantages"] / len(ROWS))


def test_the_effective_sample_size_is_kishs_over_tokens_and_over_rows_of_all_micro_batches():
    log_w, rows = 0.5 * draw(1, len(ROWS)), torch.tensor(ROWS)
    first, second = (weight_moments(log_w[part], rows[part]) for part in (rows < 2, rows >= 2))
    moments = (first + second).tolist()
    weights = log_w.exp().tolist()
    products = [math.prod(w for w, row in zip(weights, ROWS, strict=True) if row == one) for one in dict.fromkeys(ROWS)]
    for found, samples in ((moments[:3], weights), (moments[3:], products)):
        want = sum(samples) ** 2 / (len(samples) * sum(w * w for w in samples))
        assert effective_sample_size(*found) == pytest.approx(want)
    assert effective_sample_size(*weight_moments(log_w[:0], rows[:0]).tolist()[:3]) == 1


def test_the_statistics_are_what_their_names_say():
    settings = derived.loss(correction="token", correction_cap=1.2)
    tokens = sampled_tokens(drawn(3), settings)
    stats = policy_loss(tokens, settings)[1]
    ratio = (tokens.logprobs_N - tokens.old_logprobs_N).exp()
    gap = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).abs()
    clipped = ((ratio > 1.28) & (tokens.advantages_N > 0)) | ((ratio < 0.8) & (tokens.advantages_N < 0))
    log_ratio = tokens.ref_logprobs_N - tokens.logprobs_N
    weights = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).exp().clamp(max=1.2)
    want = {
        "entropy": tokens.entropy_N.sum(),
        "clip_frac": clipped.double().sum(),
        "clip_frac_positive": (clipped & (tokens.advantages_N > 0)).double().sum(),
        "clip_frac_negative": (clipped & (tokens.advantages_N <= 0)).double().sum(),
        "kl_sampler": k3_kl(tokens.rollout_logprobs_N, tokens.old_logprobs_N).sum(),
        "ratio_mean": ratio.sum(),
        "kl": (log_ratio.exp() - log_ratio - 1).sum(),
        "logprob_diff_mean": gap.sum(),
        "correction_mean": weights.sum(),
        "ratio_max": ratio.max(),
        "logprob_diff_max": gap.max(),
    }
    assert 0 < float(clipped.sum()) < len(ROWS)
    assert stats.keys() == want.keys()
    for name, value in stats.items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=1e-12)
    assert policy_loss(replace(tokens, ref_logprobs_N=None), settings)[1].keys() == want.keys() - {"kl"}


def test_statistics_of_micro_batches_add_up_to_those_of_the_whole():
    settings = derived.loss(correction="token")
    whole = sampled_tokens(drawn(3), settings)
    _, of_whole = policy_loss(whole, settings)
    parts: list[dict[str, float]] = []
    for part in (whole.rows_N < 2, whole.rows_N >= 2):
        cut = SampledTokens(**{name: getattr(whole, name)[part] for name in SampledTokens.__slots__})
        tokens = int(part.sum())
        stats = policy_loss(cut, settings)[1]
        means = {name: step_metric(name)[0].reduction is Reduction.MEAN for name in stats}
        parts.append({name: float(value) / (tokens if means[name] else 1) for name, value in stats.items()})
    together = combined(parts, weights=[int((whole.rows_N < 2).sum()), int((whole.rows_N >= 2).sum())])
    for name, value in of_whole.items():
        of_step = float(value) / (len(whole.rows_N) if step_metric(name)[0].reduction is Reduction.MEAN else 1)
        assert together[name] == pytest.approx(of_step, abs=1e-12)


def test_cross_entropy_is_torchs_own():
    logits = draw(1, 9, 5)
    targets = torch.arange(9) % 5
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    loss, stats = likelihood_loss(logprobs, torch.full((9,), 0.5), torch.full((9,), 1 / 9).double())
    assert float(loss) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets)), abs=1e-7)
    assert {name: float(value) for name, value in stats.items()} == {"entropy": 4.5}


def test_a_kl_term_needs_the_references_logprobs():
    with pytest.raises(ValueError, match="no ref_logprobs"):
        policy_loss(sampled(torch.zeros(1)), derived.loss(kl_coefficient=0.5))


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_token_that_became_vastly_likelier_gives_finite_losses_and_gradients(advantage: float):
    logprobs = torch.tensor([-0.1], requires_grad=True)
    # The reference is not a log-prob, but as far off as one could be.
    far_off = {"old_logprobs_N": torch.tensor([-200.0]), "ref_logprobs_N": torch.tensor([200.0])}
    tokens = sampled(logprobs, advantages_N=torch.tensor([advantage]), **far_off)
    loss, stats = policy_loss(tokens, derived.loss(kl_coefficient=0.1))
    loss.backward()
    assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in stats.values())


def test_log_ratios_are_cut_off_at_twenty_on_one_side_alone():
    advantages = torch.ones(3)
    surrogate = clipped_surrogate(
        torch.tensor([30.0, 19.0, -30.0]), torch.zeros(3), advantages, clip_low=0.2, clip_high=0.28
    )
    assert surrogate.ratio_N.log().tolist() == pytest.approx([20.0, 19.0, -30.0])
    assert k3_kl(torch.tensor([-30.0]), torch.zeros(1)).tolist() == pytest.approx([math.exp(20) - 21])


def test_ratios_at_the_ends_of_the_clip_are_not_clipped():
    ratios = torch.tensor([0.75, 1.5, 0.74, 1.51], dtype=torch.float64)
    for advantage, clipped in ((1.0, [False, False, False, True]), (-1.0, [False, False, True, False])):
        surrogate = clipped_surrogate(
            ratios.log(), torch.zeros(4).double(), torch.full((4,), advantage).double(), clip_low=0.25, clip_high=0.5
        )
        near = torch.isclose(surrogate.objective_N, ratios * advantage, rtol=0, atol=1e-12)
        assert (~near).tolist() == clipped
        assert surrogate.clipped_N[2:].tolist() == clipped[2:]


def test_the_dual_clip_leaves_good_tokens_alone_and_reports_what_it_bound():
    surrogate = clipped_surrogate(
        torch.tensor([3.0, 3.0, 0.1]),
        torch.zeros(3),
        torch.tensor([1.0, -1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=2.0,
    )
    assert surrogate.objective_N.tolist() == pytest.approx([1.28, -2.0, -math.exp(0.1)])
    assert surrogate.clipped_N.tolist() == [True, True, False]


@pytest.mark.parametrize("updates_per_step", [1, 4])
def test_a_bfloat16_learner_truncates_importance_weights_by_default_and_a_float32_learner_does_not(
    updates_per_step: int,
):
    def correction(**values: Any) -> str:
        values["optimizer__updates_per_step"] = updates_per_step
        settings = {name.replace("__", "."): value for name, value in values.items()}
        return with_values(RunConfig(), settings).loss.correction

    assert correction() == "token"
    assert correction(learner__dtype="float32") == "none"
    assert correction(algorithm__correction="none") == "none"
    assert correction(learner__dtype="float32", algorithm__correction="icepop") == "icepop"
    assert correction(staleness=1) == correction(learner__dtype="float32", staleness=2) == "sampler"
    assert correction(staleness=1, algorithm__correction="token") == "token"
    assert correction(algorithm__loss="dppo") == "sampler"


def test_two_corrections_and_none_for_stale_tokens_are_refused():
    with pytest.raises(ConfigError, match=r"--algorithm\.correction: token would be a second correction"):
        AlgorithmConfig(loss="dppo", correction="token")
    with pytest.raises(ConfigError, match=r"--algorithm\.correction: .* Hint: give --staleness 0"):
        with_values(RunConfig(), {"staleness": 1, "algorithm.correction": "none"})


@pytest.mark.parametrize("loss", ["cispo", "dppo"])
def test_a_token_without_an_advantage_is_not_counted_as_clipped(loss: str):
    tokens = sampled(torch.zeros(2), old_logprobs_N=torch.full((2,), -9.0), advantages_N=torch.tensor([0.0, -1.0]))
    made = LOSSES[loss](tokens, AlgorithmConfig())
    assert not isinstance(made, Tensor)
    assert made.clipped_N.tolist() == [False, True]


def test_dppo_truncates_the_ratio_and_keeps_the_gradient_of_the_log_prob():
    old_N = torch.tensor([math.log(1e-4), math.log(1e-4), math.log(0.1)], dtype=torch.float64)
    logprobs_N = torch.tensor([math.log(0.1), math.log(0.9), math.log(0.2)], dtype=torch.float64).requires_grad_()
    tokens = sampled(logprobs_N, old_logprobs_N=old_N, advantages_N=torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))
    objective_N = LOSSES["dppo"](tokens, AlgorithmConfig(loss="dppo"))
    assert not isinstance(objective_N, Tensor)
    torch.testing.assert_close(objective_N.objective_N.tolist(), [20.0, -20.0, 2.0])
    assert objective_N.clipped_N.tolist() == [True, True, False]
    objective_N.objective_N.sum().backward()
    torch.testing.assert_close(logprobs_N.grad.tolist(), [20.0, -20.0, 2.0])
