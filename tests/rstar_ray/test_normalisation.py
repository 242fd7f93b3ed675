"""What a token's loss weighs, against a plain loop over prompt groups."""

from typing import get_args

import numpy as np
import pytest
import torch

from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.config.algorithm import Normalisation

SAMPLED = [4, 1, 0, 5, 2]
GROUPS = ["a", "b", "b", "a", "c"]


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token", [1 / 12] * 5),
        ("sequence", [1 / 16, 1 / 4, 1 / 4, 1 / 20, 1 / 8]),
        ("constant", [1 / 32] * 5),
        ("group", [1 / 27, 1 / 3, 1 / 3, 1 / 27, 1 / 6]),
    ],
)
def test_each_normalisation_divides_by_what_it_says(mode: Normalisation, want: list[float]):
    assert token_weights(SAMPLED, GROUPS, mode, constant_tokens=8) == pytest.approx(want)


@pytest.mark.parametrize("mode", get_args(Normalisation))
def test_an_update_without_a_sampled_token_has_weights_too(mode: Normalisation):
    assert token_weights([0, 0], ["a", "b"], mode) == [1.0, 1.0]
    assert token_weights([], [], mode) == []


def test_a_group_without_a_sampled_token_is_not_a_group():
    assert token_weights([2, 0], ["a", "b"], "group") == [0.5, 1.0]


def test_the_gradient_by_group_is_that_of_eq_6_taken_group_by_group_and_averaged():
    """arXiv:2508.20722 Eq. 6 is the objective of one prompt: each is divided by its own sum of |o_i|."""
    rng = np.random.default_rng(0)
    sampled = rng.integers(1, 9, 12).tolist()
    groups = [f"g{i % 4}" for i in range(12)]
    features = [torch.from_numpy(rng.standard_normal((count, 5))) for count in sampled]
    advantages = rng.standard_normal(12).tolist()

    reference = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    objectives = []
    for group in sorted(set(groups)):
        rows = [i for i in range(12) if groups[i] == group]
        tokens = torch.cat([advantages[i] * (features[i] @ reference).tanh() for i in rows])
        objectives.append(tokens.sum() / len(tokens))
    (sum(objectives) / len(objectives)).backward()

    weights = token_weights(sampled, groups, "group")
    for cuts in ([range(12)], [range(0, 12, 2), range(1, 12, 2)], [[i] for i in range(12)]):
        ours = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        for micro_batch in cuts:
            terms = [weights[i] * advantages[i] * (features[i] @ ours).tanh().sum() for i in micro_batch]
            torch.stack(terms).sum().backward()
        torch.testing.assert_close(ours.grad, reference.grad, rtol=0, atol=1e-12)
