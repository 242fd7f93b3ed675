"""Our gradient beside TRL's on a made-up step, and two runs compared token by token."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import parity_rules
from benchmarks.parity import compare, first_difference, main
from rstar_ray.algorithm.loss import policy_loss
from rstar_ray.algorithm.surrogate import clipped
from rstar_ray.config import AlgorithmConfig
from rstar_ray.run_dir.durable import append_row
from rstar_ray.tiny.tiny_model import make_tiny_model
from tests.rstar_ray.test_loss import sampled


def made_up_step(path: Path) -> Path:
    """Four rows of two groups, with a tool result in the middle of each."""
    from safetensors.numpy import save_file

    rng, shape = np.random.default_rng(0), (4, 40)
    lengths = np.array([40, 31, 22, 36])
    places = np.arange(shape[1])
    mask = (places >= 10) & ~((places > 15) & (places < 19)) & (places < lengths[:, None])
    advantages = np.array([1.0, -1.0, 0.5, -0.5], np.float32)[:, None] * mask
    arrays = {
        "input_ids": rng.integers(5, 200, shape),
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, -5 - rng.random(shape), 0).astype(np.float32),
        "advantages": advantages.astype(np.float32),
        "lengths": lengths,
        "groups": np.array([0, 0, 1, 1]),
    }
    settings = {"algorithm": asdict(AlgorithmConfig(correction="none")), "temperature": 1.0}
    save_file(arrays, path, metadata={"settings": json.dumps(settings)})
    return path


@pytest.mark.slow  # importing TRL takes long
def test_gradients_are_those_of_trl_in_float32(tmp_path: Path):
    pytest.importorskip("trl")
    step, model = made_up_step(tmp_path / "step.safetensors"), make_tiny_model(tmp_path / "model", seed=0)
    rows = compare(step, model, with_verl=False)
    assert [row["equal"] for row in rows] == [True] * 3, rows
    assert [row["clipped_tokens"] > 0 for row in rows] == [False, True, True]
    exact = compare(step, model, with_verl=False, dtype=torch.float64)
    assert max(row["relative_difference"] for row in exact) < 3e-7, exact


def run(path: Path, tokens: list[int]) -> Path:
    (path / "trajectories").mkdir(parents=True)
    for step in (1, 2):
        row = {"rollout_id": "a", "turns": [{"completion_ids": tokens if step == 2 else [1]}]}
        append_row(path / "trajectories" / f"stage1-step-{step:06}.jsonl", row)
    return path


def test_the_first_token_in_which_two_runs_differ_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [run(tmp_path / "ours", [3, 4, 5]), run(tmp_path / "theirs", [3, 9, 5])]
    assert "step-000002.jsonl: a differs first in sampled token 1; 1 steps are equal" in first_difference(
        runs, "stage1"
    )
    assert first_difference([runs[0], runs[0]], "stage1") == "2 recorded steps are equal token by token"
    assert main(["--runs", *map(str, runs), "--stage", "stage2"]) == 2
    assert main(["step.safetensors"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_rollout_or_a_step_that_one_run_lacks_is_named(tmp_path: Path):
    ours, theirs = run(tmp_path / "ours", [3, 4, 5]), run(tmp_path / "theirs", [3, 9, 5])
    (theirs / "trajectories" / "stage1-step-000002.jsonl").rename(theirs / "trajectories" / "stage1-step-000010.jsonl")
    line = first_difference([ours, theirs], "stage1")
    assert line.startswith("1 recorded steps are equal")
    assert f"only {ours} has recorded step 2;" in line and line.endswith(f"only {theirs} has recorded step 10")
    more = {"rollout_id": "b", "turns": [{"completion_ids": [1]}]}
    append_row(theirs / "trajectories" / "stage1-step-000001.jsonl", more)
    for runs in ([ours, theirs], [theirs, ours]):
        line = first_difference(runs, "stage1")
        assert line.startswith(f"stage1-step-000001.jsonl: only {theirs} has b; 0 steps are equal; ")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package", "dual_clip"), [("trl", "trl", 0.0), ("verl", "verl", 3.0)])
def test_a_foreign_loss_as_a_rule_has_the_gradient_of_ours(name: str, package: str, dual_clip: float):
    pytest.importorskip(package)
    draw = torch.Generator().manual_seed(0)
    algorithm = AlgorithmConfig(correction="none", dual_clip=dual_clip)
    gradients: list[torch.Tensor] = []
    given = {key: torch.randn(50, generator=draw) for key in ("old_logprobs_N", "advantages_N")}
    more_N = torch.randn(50, generator=draw)
    for rule in (clipped, getattr(parity_rules, name)):
        logprobs_N = (given["old_logprobs_N"] + more_N).requires_grad_()
        weights_N = torch.full((50,), 1 / 320)  # of an update of 320 tokens, of which these are a part
        tokens = sampled(logprobs_N, weights_N=weights_N, **given)
        policy_loss(tokens, algorithm, rule)[0].backward()
        assert logprobs_N.grad is not None
        gradients.append(logprobs_N.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-8)
