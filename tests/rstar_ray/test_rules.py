"""Rules of the algorithm by import path: used where a built-in one is, and refused early where they fail."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.launch.changed_settings import changed_rules, rule_digests
from rstar_ray.algorithm import rules
from rstar_ray.algorithm.loss import policy_loss, try_rule
from rstar_ray.algorithm.resample import RESAMPLING
from rstar_ray.algorithm.rules import advantages, check_rules, kept_indices, rule
from rstar_ray.algorithm.surrogate import LOSSES
from rstar_ray.config import AlgorithmConfig, RunConfig
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.run_dir.folder import RunDir
from tests.rstar_ray.fabricate import summary
from tests.rstar_ray.test_loss import sampled

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithm.md"
SHOWN = PAGE.read_text("utf-8").partition("## Your own rules")[2].partition("```python\n")[2].partition("```")[0]
"""The example of the documentation."""
WRONG = """
import signal
import sys
import time
import numpy as np
import torch
from rstar_ray.algorithm.surrogate import Surrogate
def twice(candidates, algorithm, rng):
    return [0, 0]

def short(rewards, algorithm):
    return [0.0]

def scalar(tokens, algorithm):
    return tokens.logprobs_N.sum()

def not_finite(tokens, algorithm):
    return tokens.logprobs_N * float("nan")

def constant(tokens, algorithm):
    return 0.0 * tokens.rollout_logprobs_N

def no_gradient(tokens, algorithm):
    return 0.0 * tokens.logprobs_N

def none_kept(candidates, algorithm, rng):
    return []

def halves(candidates, algorithm, rng):
    return [0.5]

def exits(rewards, algorithm):
    raise SystemExit(7)

def discounted(rewards, algorithm, summaries):
    return [
        [reward * 0.5 ** (one.num_sampled_tokens - 1 - place) for place in range(one.num_sampled_tokens)]
        for reward, one in zip(rewards, summaries)
    ]

def one_token_short(rewards, algorithm, summaries):
    return [[0.0] * (one.num_sampled_tokens - 1) for one in summaries]

def nan_token(rewards, algorithm, summaries):
    return [[float("nan")] * one.num_sampled_tokens for one in summaries]

def one_parameter(rewards):
    return rewards

def of_whole_groups(candidates, algorithm, rng):
    return rng.choice(len(candidates), algorithm.keep, replace=False)

def zeros(rewards, algorithm):
    return [0.0] * len(rewards)

def leave_one_out(rewards, algorithm):
    return [one - (sum(rewards) - one) / (len(rewards) - 1) for one in rewards]

def of_at_most_keep(rewards, algorithm):
    assert len(rewards) <= algorithm.keep
    return rewards

def of_whole_groups_alone(rewards, algorithm):
    return rewards if len(rewards) == algorithm.keep else [0.0] * len(rewards)

def by_length_without_failures(rewards, algorithm, summaries):
    mean = np.mean([one.num_response_tokens for one in summaries])
    return [0.0 if one.num_failed else mean - one.num_response_tokens for one in summaries]

def without_failures(candidates, algorithm, rng):
    return [place for place, one in enumerate(candidates) if not one.num_failed][:algorithm.keep]

def of_uncertain_tokens(tokens, algorithm):
    entropy = tokens.entropy_N
    chosen = entropy > torch.quantile(entropy, 0.8)
    return -tokens.logprobs_N * tokens.advantages_N * chosen * (entropy - entropy.mean()) / entropy.std()

def mismatched(tokens, algorithm):
    return tokens.logprobs_N[:3] * tokens.advantages_N

def as_an_objective(tokens, algorithm):
    logprobs = tokens.logprobs_N[:, None]  # [N, 1] would be broadcast to [N, N]
    return Surrogate(logprobs, logprobs, logprobs > 0)

def not_finite_at_a_ratio_of_1(tokens, algorithm):
    moved = tokens.logprobs_N - tokens.old_logprobs_N
    return moved.abs().sqrt() - tokens.logprobs_N * tokens.advantages_N

def distilled(tokens, algorithm):
    return tokens.logprobs_N - tokens.ref_logprobs_N

def largest(tokens, algorithm):
    return -tokens.logprobs_N * tokens.advantages_N / tokens.advantages_N.abs().max()

def without_memory(tokens, algorithm):
    raise torch.OutOfMemoryError("out of memory")

def two_lines(rewards, algorithm):
    raise ValueError("one\\nother")

def none_for_failures(candidates, algorithm, rng):
    if any(candidate.reward > 0 for candidate in candidates):
        return [0]

def none_for_positives(tokens, algorithm):
    if (tokens.advantages_N < 0).any():
        return -tokens.logprobs_N * tokens.advantages_N

def by_the_deviation(rewards, algorithm):
    values = np.array(rewards)
    return (values - values.mean()) / values.std()

def sorts_in_place(candidates, algorithm, rng):
    candidates.sort(key=lambda candidate: -candidate.reward)
    return range(algorithm.keep)

def by_index(rewards, algorithm):
    return dict(enumerate(rewards))

def draws_without_the_generator(candidates, algorithm, rng):
    return np.random.permutation(len(candidates))[:algorithm.keep]

def words(rewards, algorithm):
    return ["one"] * len(rewards)

def shortest(candidates, algorithm, rng):
    order = sorted(range(len(candidates)), key=lambda i: candidates[i].num_response_tokens)
    return [i for i in order if not candidates[i].stop_reason.truncated][:algorithm.keep]

def flagged(rewards, algorithm, inverted=False):
    return [-reward if inverted else reward for reward in rewards]

def of_reliable_calls(candidates, algorithm, rng):
    return sorted(range(len(candidates)), key=lambda i: candidates[i].num_failed / candidates[i].num_calls)[:2]

def of_one_answer(candidates, algorithm, rng):
    return sorted(range(len(candidates)), key=lambda i: candidates[i].num_answers - 1)[:2]

def with_an_alarm(candidates, algorithm, rng):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return range(2)

def over_the_mean(rewards, algorithm):
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) / mean for reward in rewards]

def wrapped(*given):
    return flagged(*given)

def detached(tokens, algorithm):
    return -(tokens.logprobs_N * tokens.advantages_N).detach()

def of_successes(tokens, algorithm):
    if not (tokens.advantages_N > 0).any():
        return torch.zeros_like(tokens.logprobs_N)
    return -tokens.logprobs_N * tokens.advantages_N.clamp(min=0)

def mean_of_successes(tokens, algorithm):
    return -tokens.logprobs_N * tokens.advantages_N / tokens.advantages_N[tokens.advantages_N > 0].mean()

def in_pairs(tokens, algorithm):
    return -(tokens.logprobs_N * tokens.advantages_N).view(-1, 2).flatten()

def in_place(tokens, algorithm):
    old_N = tokens.old_logprobs_N.clamp_(min=-1.05)
    return -torch.exp(tokens.logprobs_N - old_N) * tokens.advantages_N

def towards_the_reference(tokens, algorithm):
    gap_N = tokens.logprobs_N - tokens.ref_logprobs_N
    return algorithm.kl_coefficient * gap_N - tokens.advantages_N * tokens.logprobs_N.detach()

def at_random(tokens, algorithm):
    return -tokens.logprobs_N * tokens.advantages_N * torch.rand(len(tokens.logprobs_N))

def exits_late(rewards, algorithm):
    return rewards if any(rewards) else sys.exit(0)

def fails_late(rewards, algorithm):
    return [1 / len([reward for reward in rewards if reward]) for _ in rewards]

def of_a_leaf(tokens, algorithm):
    logprobs = tokens.logprobs_N.detach().requires_grad_()
    return -logprobs * tokens.advantages_N

def forever(tokens, algorithm):
    time.sleep(3600)

def digits(rewards, algorithm):
    return "1" * len(rewards)

def by_keyword(rewards, algorithm, *, summaries=None):
    return rewards

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A separate module for each test: one that is imported stays."""
    (tmp_path / f"{module(request.node.name)}.py").write_text(SHOWN + WRONG)
    return str(tmp_path)


def module(test: str) -> str:
    return "rules_of_" + "".join(letter if letter.isalnum() else "_" for letter in test)


def test_rules_of_the_user_are_used(folder: str, request: pytest.FixtureRequest):
    mine = module(request.node.name)
    algorithm = AlgorithmConfig(keep=2, resample=f"{mine}:best", advantage=f"{mine}:centred", loss=f"{mine}:reinforce")
    check_rules(algorithm, folder)
    group = [summary(reward=reward) for reward in (0.0, 1.0, 0.5)]
    assert kept_indices(group, algorithm, np.random.default_rng(0), folder) == [1, 2]
    assert advantages([1.0, 0.0], algorithm, folder, group[:2]) == [0.5, -0.5]


@pytest.mark.parametrize(
    "values",
    [
        {"advantage": "of_at_most_keep"},
        {"advantage": "of_whole_groups_alone"},
        {"advantage": "by_length_without_failures"},
        {"resample": "without_failures"},
        {"loss": "of_uncertain_tokens"},
    ],
)
def test_made_up_data_is_as_varied_as_a_runs(values: dict[str, str], folder: str, request: pytest.FixtureRequest):
    mine = module(request.node.name)
    check_rules(AlgorithmConfig(**{kind: f"{mine}:{name}" for kind, name in values.items()}), folder)


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    rewards = [1.0, 0.0, 0.25, 1.0]
    want = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    group = [summary(reward=reward) for reward in rewards]
    assert advantages(rewards, AlgorithmConfig(advantage="rloo"), "", group) == pytest.approx(want, rel=1e-12)


def test_an_advantage_rule_may_give_one_for_each_sampled_token(folder: str, request: pytest.FixtureRequest):
    mine = module(request.node.name)
    algorithm = AlgorithmConfig(keep=2, advantage=f"{mine}:discounted")
    check_rules(algorithm, folder)
    group = [summary(reward=reward, sampled=tokens) for reward, tokens in ((1.0, 3), (0.0, 2))]
    first, second = advantages([1.0, 0.0], algorithm, folder, group)
    assert np.asarray(first).tolist() == [0.25, 0.5, 1.0] and np.asarray(second).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_built_in_loss_passes_the_check_of_a_users_loss(name: str):
    try_rule(LOSSES[name], AlgorithmConfig(loss=name))


FAIL = {
    "resample": (
        *("twice", "none_kept", "halves", "one_parameter", "sorts_in_place", "none_for_failures"),
        *("draws_without_the_generator", "of_whole_groups", "of_reliable_calls", "of_one_answer", "with_an_alarm"),
    ),
    "advantage": (
        *("short", "one_token_short", "nan_token", "exits", "one_parameter", "two_lines", "by_the_deviation"),
        *("by_index", "words", "zeros", "leave_one_out", "digits", "by_keyword"),
    ),
    "loss": (
        *("scalar", "not_finite", "constant", "no_gradient", "one_parameter", "mismatched", "as_an_objective"),
        *("not_finite_at_a_ratio_of_1", "distilled", "none_for_positives", "detached", "mean_of_successes", "in_pairs"),
        *("in_place", "at_random", "of_a_leaf"),
    ),
}


SAID = {
    "of_a_leaf": "its gradient does not reach `logprobs_N`",
    "digits": "it returns str, not a list",
    "by_keyword": "`summaries` must be its third positional parameter",
    "zeros": "every advantage is 0",
    "leave_one_out": "ZeroDivisionError: float division by zero, with rewards 0)",
    "distilled": "Hint: `ref_logprobs_N` needs --algorithm.reference-model",
    "mismatched": "(RuntimeError",
    "detached": "it must depend on `logprobs_N`",
    "in_place": "it changes `old_logprobs_N` in place",
    "of_reliable_calls": "ZeroDivisionError",
    "of_one_answer": "TypeError",
    "with_an_alarm": "main thread",
    "at_random": "a second call with the same tokens gives another",
    "draws_without_the_generator": "a second call with the same arguments gives another result",
}


@pytest.mark.parametrize(("kind", "function"), [(kind, one) for kind, functions in FAIL.items() for one in functions])
def test_a_rule_that_fails_on_made_up_data_is_refused_in_one_line(
    kind: str, function: str, folder: str, request: pytest.FixtureRequest
):
    name = f"{module(request.node.name)}:{function}"
    values: dict[str, Any] = {kind: name, "reject_equal_reward": function not in ("by_the_deviation", "leave_one_out")}
    with pytest.raises(ConfigError) as refused:
        check_rules(AlgorithmConfig(**values), folder)
    line = str(refused.value)
    assert line.startswith(f"--algorithm.{kind} {name}: it fails on made-up data") and "\n" not in line
    assert SAID.get(function, "") in line


def test_a_loss_that_never_returns_is_refused(
    folder: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rules, "TESTED_WITHIN_S", 0.5)
    with pytest.raises(ConfigError, match="it fails on made-up data"):
        check_rules(AlgorithmConfig(loss=f"{module(request.node.name)}:forever"), folder)


def test_with_a_penalty_rewards_may_be_negative(folder: str, request: pytest.FixtureRequest):
    rule = AlgorithmConfig(advantage=f"{module(request.node.name)}:over_the_mean")
    check_rules(rule, folder)
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: .*, with rewards -1, 1"):
        check_rules(replace(rule, overlong_buffer=4), folder)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("loss", "{mine}:number", "--algorithm.loss {mine}:number: number is not a function"),
        ("loss", "absent:rule", "--algorithm.loss absent:rule: ModuleNotFoundError"),
        ("loss", "sys:rule", "--algorithm.loss sys:rule: rule is not a function"),
        ("resample", "best", "--algorithm.resample: not a rule (got 'best'). Hint: choose paper, release"),
    ],
)
def test_what_is_not_a_rule_is_refused(kind: str, name: str, said: str, folder: str, request: pytest.FixtureRequest):
    mine = module(request.node.name)
    values: dict[str, Any] = {kind: name.format(mine=mine)}
    with pytest.raises(ConfigError) as refused:
        check_rules(AlgorithmConfig(**values), folder)
    assert str(refused.value).startswith(said.format(mine=mine))


def test_a_rule_that_fails_in_a_run_is_named(folder: str, request: pytest.FixtureRequest):
    algorithm = AlgorithmConfig(resample=f"{module(request.node.name)}:twice")
    with pytest.raises(RStarError, match=r"--algorithm\.resample rules_of_\w+:twice: \[0, 0\] are not indices"):
        kept_indices([summary(), summary()], algorithm, np.random.default_rng(0), folder)


@pytest.mark.parametrize(("function", "said"), [("fails_late", "ZeroDivisionError"), ("exits_late", "SystemExit: 0")])
def test_a_rule_that_raises_in_a_run_is_named(folder: str, request: pytest.FixtureRequest, function: str, said: str):
    algorithm = AlgorithmConfig(advantage=f"{module(request.node.name)}:{function}")
    check_rules(algorithm, folder)
    with pytest.raises(RStarError, match=rf"--algorithm\.advantage rules_of_\w+:{function}: {said}"):
        advantages([0.0, 0.0], algorithm, folder, [summary(), summary()])


def test_a_fault_of_the_device_in_a_loss_stays_one_so_that_ranks_are_restarted(
    folder: str, request: pytest.FixtureRequest
):
    algorithm = AlgorithmConfig(loss=f"{module(request.node.name)}:without_memory")
    with pytest.raises(torch.OutOfMemoryError):
        rule("loss", algorithm, folder)(sampled(torch.zeros(2)), algorithm)


def test_a_gradient_that_does_not_flow_is_refused_with_a_kl_term_too(folder: str, request: pytest.FixtureRequest):
    name = f"{module(request.node.name)}:detached"
    with pytest.raises(ConfigError, match="it must depend on `logprobs_N`"):
        check_rules(AlgorithmConfig(loss=name, kl_coefficient=0.1, reference_model="teacher"), folder)


def test_a_loss_may_read_the_coefficients(folder: str, request: pytest.FixtureRequest):
    name = f"{module(request.node.name)}:towards_the_reference"
    check_rules(AlgorithmConfig(loss=name, kl_coefficient=0.1, reference_model="teacher"), folder)


def test_a_loss_that_is_constant_for_some_tokens_has_a_gradient_of_0(folder: str, request: pytest.FixtureRequest):
    algorithm = AlgorithmConfig(loss=f"{module(request.node.name)}:of_successes", correction="none")
    check_rules(algorithm, folder)
    tokens = sampled((-torch.ones(2)).requires_grad_(), advantages_N=-torch.ones(2))
    loss, _ = policy_loss(tokens, algorithm, rule("loss", algorithm, folder))
    loss.backward()
    assert loss == 0 and tokens.logprobs_N.grad is not None and not tokens.logprobs_N.grad.any()


def test_a_resampling_rule_may_read_all_of_a_summary(folder: str, request: pytest.FixtureRequest):
    algorithm = AlgorithmConfig(keep=2, resample=f"{module(request.node.name)}:shortest")
    check_rules(algorithm, folder)
    group = [summary(response=tokens) for tokens in (30, 10, 20)]
    assert kept_indices(group, algorithm, np.random.default_rng(0), folder) == [1, 2]


@pytest.mark.parametrize("name", ["flagged", "wrapped"])
def test_a_third_parameter_with_a_default_is_not_given_the_summaries(
    name: str, folder: str, request: pytest.FixtureRequest
):
    algorithm = AlgorithmConfig(advantage=f"{module(request.node.name)}:{name}")
    check_rules(algorithm, folder)
    assert advantages([1.0, 0.0], algorithm, folder, [summary(), summary()]) == [1.0, 0.0]


def test_a_loss_is_not_called_for_a_rank_without_rows(folder: str, request: pytest.FixtureRequest):
    algorithm = AlgorithmConfig(loss=f"{module(request.node.name)}:largest", correction="none")
    tokens = sampled(torch.zeros(0, requires_grad=True))
    loss, _ = policy_loss(tokens, algorithm, rule("loss", algorithm, folder))
    loss.backward()
    assert loss == 0 and tokens.logprobs_N.grad is not None


@pytest.mark.parametrize("name", RESAMPLING)
def test_the_built_in_rules_are_found_by_name(name: str):
    assert rule("resample", AlgorithmConfig(resample=name), "") is RESAMPLING[name]


def test_a_run_of_a_version_without_these_settings_resumes(tmp_path: Path):
    config = asdict(RunConfig())
    with RunDir.open(tmp_path, "stage1", config):
        pass
    written = json.loads((tmp_path / "config.json").read_text())
    for name in ("advantage", "loss", "dppo_threshold", "min_ess", "max_low_ess_steps"):
        del written["stage1"]["algorithm"][name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with RunDir.open(tmp_path, "stage1", config):
        pass
    mine = asdict(RunConfig(algorithm=AlgorithmConfig(advantage="mine:centred")))
    with (
        pytest.raises(ConfigError, match=r"algorithm\.advantage: '?group'? there"),
        RunDir.open(tmp_path, "stage1", mine),
    ):
        pass


def test_a_rule_whose_code_changed_since_the_stage_was_started_is_named(tmp_path: Path):
    (tmp_path / "changing.py").write_text("def best(candidates, algorithm, rng):\n    return [0]\n")
    config = RunConfig(own_folder=str(tmp_path), algorithm=AlgorithmConfig(resample="changing:best"))
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.log_launch(stage=config.stage, rules=rule_digests(config))
    assert changed_rules(run_dir, config) == []
    (tmp_path / "changing.py").write_text("def best(candidates, algorithm, rng):\n    return [1]\n")
    (line,) = changed_rules(run_dir, config)
    assert "changing" in line and config.stage in line
