"""The example of distillation: its expected gradient is that of the KL divergence, and it is accepted as a loss."""

import torch

from examples.distillation import reverse_kl
from rstar_ray.algorithm.rules import check_rules
from rstar_ray.config import AlgorithmConfig
from tests.rstar_ray.test_loss import sampled

VOCABULARY = 7


def test_its_expected_gradient_is_that_of_the_reverse_kl_divergence():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (want,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    weights_N = policy.detach().exp()  # every token once, weighed by its probability
    tokens = sampled(policy, weights_N=weights_N, ref_logprobs_N=teacher)
    loss = (tokens.weights_N * reverse_kl(tokens, AlgorithmConfig())).sum()
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, want)


def test_it_is_accepted_as_a_rule_of_the_users():
    check_rules(AlgorithmConfig(loss="distillation:reverse_kl", reference_model="teacher"), "examples")
