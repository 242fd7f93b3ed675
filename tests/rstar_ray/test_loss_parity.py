"""The same tensors through our loss and through that of TRL's GRPOTrainer; skipped where TRL is not installed."""

from typing import Any

import pytest
import torch

from benchmarks.parity_rules import trl_loss
from rstar_ray.algorithm.loss import policy_loss
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.surrogate import LOSSES, SampledTokens
from rstar_ray.config import AlgorithmConfig
from tests import derived

pytestmark = pytest.mark.slow  # importing TRL takes long

ROWS, TOKENS, CONSTANT_TOKENS = 6, 11, 17


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
def test_loss_and_gradient_are_those_of_trl(settings: AlgorithmConfig, seed: int):
    pytest.importorskip("accelerate")
    pytest.importorskip("trl")
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
    given = {name: values for name, values in tensors.items() if name != "rollout" or settings.correction != "none"}
    theirs = trl_loss(settings, {**given, "logprobs": leaves[0]}, constant=CONSTANT_TOKENS)
    ours = our_loss(settings, {**tensors, "logprobs": leaves[1]})
    theirs.backward()
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    assert float((leaves[0].grad - leaves[1].grad).abs().max()) < 1e-6
