"""The example of rules: each gives what its paper says, and a run accepts it without an edit of the product."""

import inspect
from itertools import combinations

import numpy as np
import pytest
import torch

from examples import own_rules
from rstar_ray.algorithm.rules import check_rules
from rstar_ray.config import AlgorithmConfig
from tests.rstar_ray.fabricate import summary
from tests.rstar_ray.test_loss import sampled


@pytest.mark.parametrize(
    ("option", "name"), [("advantage", "max_likelihood"), ("loss", "soft_gate"), ("resample", "max_variance")]
)
def test_a_rule_is_accepted_and_has_less_than_30_lines(option: str, name: str):
    check_rules(AlgorithmConfig(**{option: f"own_rules:{name}"}), "examples")
    assert len(inspect.getsource(getattr(own_rules, name)).splitlines()) < 30


def test_max_likelihood_divides_by_the_mean_reward():
    assert own_rules.max_likelihood([1.0, 0.0, 0.0, 0.0], AlgorithmConfig()) == [3.0, -1.0, -1.0, -1.0]
    assert own_rules.max_likelihood([0.0, 0.0], AlgorithmConfig()) == [0.0, 0.0]
    assert own_rules.max_likelihood([0.0, 0.0, -1.0], AlgorithmConfig()) == [0.0] * 3, "after a penalty on length"


def test_the_soft_gate_has_the_policy_gradient_at_a_ratio_of_1_and_less_of_it_elsewhere():
    log_ratios_N = torch.tensor([0.0, 0.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    advantages_N = torch.tensor([2.0, -0.5, 1.0, -1.0, 1.0], dtype=torch.float64)
    logprobs_N = (log_ratios_N - 1.0).requires_grad_()
    tokens = sampled(logprobs_N, old_logprobs_N=torch.full_like(log_ratios_N, -1.0), advantages_N=advantages_N)
    own_rules.soft_gate(tokens, AlgorithmConfig()).sum().backward()
    ratio_N, tau_N = log_ratios_N.exp(), torch.where(advantages_N > 0, 1.0, 1.05).double()
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1))
    torch.testing.assert_close(logprobs_N.grad, -4 * gate_N * (1 - gate_N) * ratio_N * advantages_N)  # the paper's


@pytest.mark.parametrize("rewards", [[0, 0, 0, 0, 0, 1], [1, 1, 1, 0, 1, 1], [0.1, 0.9, 0.4, 0.5, 0.3, 1.0], [1] * 6])
def test_no_other_choice_has_a_larger_variance(rewards: list[float]):
    candidates = [summary(reward=one) for one in rewards]
    algorithm = AlgorithmConfig(keep=4, rollouts_per_prompt=6)
    kept = own_rules.max_variance(candidates, algorithm, np.random.default_rng(0))
    largest = max(np.var(four) for four in combinations(rewards, 4))
    assert len(set(kept)) == 4 and np.var([rewards[i] for i in kept]) == pytest.approx(largest)
