"""The same tensors through our loss and through that of TRL's GRPOTrainer; skipped where TRL is not installed."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rstar_ray.algorithm.loss import policy_loss
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.surrogate import LOSSES, SampledTokens
from rstar_ray.config import AlgorithmConfig
from tests import derived

pytestmark = pytest.mark.slow  # importing TRL takes long

ROWS, TOKENS, CONSTANT_TOKENS = 6, 11, 17
NAMES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}


@pytest.fixture(scope="module")
def trainer() -> Any:
    pytest.importorskip("accelerate")
    pytest.importorskip("trl")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


def trl_loss(trainer: Any, settings: AlgorithmConfig, tensors: dict[str, Any]) -> Any:
    """`GRPOTrainer._compute_loss` with a model that answers with given log-probs."""
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (tensors["logprobs"], tensors["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if settings.loss == "gspo" else "token",
        loss_type="cispo" if settings.loss == "cispo" else NAMES[settings.normalisation],
        beta=settings.kl_coefficient,
        epsilon_low=settings.clip_low,
        epsilon_high=settings.clip_high + (settings.loss == "cispo"),  # of CISPO TRL's is the cap of the ratio itself
        args=SimpleNamespace(use_bias_correction_kl=False, delta=settings.dual_clip or None, steps_per_generation=1),
        use_vllm=settings.correction != "none",
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=CONSTANT_TOKENS,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, **_: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1),
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": torch.zeros(ROWS, TOKENS),
        "completion_mask": tensors["mask"].int(),
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["ref"],
        "num_items_in_batch": tensors["mask"].sum(),
        "importance_sampling_ratio": (tensors["old"] - tensors["rollout"]).exp().clamp(max=settings.correction_cap),
    }
    return trainer._compute_loss(stand_in, None, inputs)


def our_loss(settings: AlgorithmConfig, tensors: dict[str, Any]) -> Any:
    mask = tensors["mask"]
    rows = torch.arange(ROWS)[:, None].expand(ROWS, TOKENS)[mask]
    lengths, groups = mask.sum(-1).tolist(), [str(row) for row in range(ROWS)]
    weights = token_weights(lengths, groups, settings.normalisation, constant_tokens=CONSTANT_TOKENS)
    tokens = SampledTokens(
        logprobs_N=tensors["logprobs"][mask],
        entropy_N=tensors["entropy"][mask],
        old_logprobs_N=tensors["old"][mask],
        rollout_logprobs_N=tensors["rollout"][mask],
        advantages_N=tensors["advantages"][rows],
        weights_N=torch.tensor(weights, dtype=torch.float64)[rows],
        rows_N=rows,
        ref_logprobs_N=tensors["ref"][mask],
    )
    return policy_loss(tokens, settings, LOSSES[settings.loss])[0]


@pytest.mark.parametrize(
    "settings",
    [
        derived.loss(),
        derived.loss(clip_low=0.1, clip_high=0.1),
        derived.loss(dual_clip=1.6),
        derived.loss(kl_coefficient=0.1),
        derived.loss(normalisation="sequence"),
        derived.loss(normalisation="sequence", kl_coefficient=0.1),
        derived.loss(normalisation="constant"),
        derived.loss(correction="token", correction_cap=1.2),
        derived.loss(loss="gspo", normalisation="sequence"),
        derived.loss(loss="cispo", clip_high=0.2),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_trl(trainer: Any, settings: AlgorithmConfig, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    base = draw(ROWS, TOKENS) - 3
    lengths = torch.randint(1, TOKENS + 1, (ROWS, 1), generator=generator)
    tensors: dict[str, Any] = {
        "old": base + 0.3 * draw(ROWS, TOKENS),
        "ref": base + 0.3 * draw(ROWS, TOKENS),
        "rollout": base + 0.3 * draw(ROWS, TOKENS),
        "entropy": draw(ROWS, TOKENS).abs(),
        "advantages": draw(ROWS),
        "mask": torch.arange(TOKENS)[None] < lengths,
    }
    leaves = [base.clone().requires_grad_(), base.clone().requires_grad_()]
    theirs = trl_loss(trainer, settings, {**tensors, "logprobs": leaves[0]})
    ours = our_loss(settings, {**tensors, "logprobs": leaves[1]})
    theirs.backward()
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    assert float((leaves[0].grad - leaves[1].grad).abs().max()) < 1e-6
