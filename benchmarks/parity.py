"""Compares a recorded step's gradient by our learner's loss with TRL's GRPO loss and verl's policy loss, in float32.

rstar replay RUN --step 1 --export step.safetensors
python -m benchmarks.parity step.safetensors --model RUN/checkpoints/sft-step-001000/model
python -m benchmarks.parity --runs RUN OTHER

The second command reads the file of `rstar replay --export` and the policy before the step. Our forward pass computes
log-probs of sampled tokens in chunks; theirs is the log-softmax of all logits. Cases: the step as it was trained (every
ratio is 1), the sampler as the old policy, and old log-probs with noise, so that clips have an effect. The last command
prints the first rollout or sampled token in which two runs differ, such as one with `--algorithm.loss parity_rules:trl`
and one without. `benchmarks/parity_rules.py` describes the installation of verl; without it a warning is logged.
"""

import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from actors.launch.exit_status import status_of
from actors.learner.policy import Policy
from benchmarks.parity_rules import trl_loss, verl_loss
from rstar_ray.algorithm.batch import TokenRow, collate
from rstar_ray.algorithm.loss import policy_loss
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.surrogate import LOSSES, SampledTokens
from rstar_ray.config import AlgorithmConfig
from rstar_ray.config.checks import require
from rstar_ray.config.options import options_of
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import read_rows

ALIKE = 1e-6
"""Relative difference up to which gradients count as equal."""
NOISE = 1.0
"""Standard deviation of the noise of old log-probs: some ratios are above 3, where the dual clip has an effect."""


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    step: Annotated[Path | None, tyro.conf.Positional] = None
    """file of `rstar replay --export`"""
    model: Path | None = None
    """the policy before the step, a Hugging Face folder"""
    runs: tuple[Path, ...] = ()
    """two run directories to compare token by token instead"""
    stage: str = "stage1"
    """of the two runs"""
    dtype: Literal["float32", "float64"] = "float32"
    """of the model: float64 shows how much of a difference is rounding"""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: the other loss, the settings, and the old policy."""

    name: str
    theirs: Callable[[AlgorithmConfig, dict[str, Any]], Any]
    algorithm: AlgorithmConfig
    old: str  # own, sampler or noise


def cases(algorithm: AlgorithmConfig, *, with_verl: bool) -> list[Case]:
    """The step's loss, normalised by token; verl always has a dual clip."""
    ours = replace(algorithm, loss="clipped", normalisation="token", correction="none", dual_clip=0.0)
    found = [Case(f"TRL, old policy: {old}", trl_loss, ours, old) for old in ("own", "sampler", "noise")]
    if with_verl:
        dual = replace(ours, dual_clip=3.0)
        found += [Case(f"verl, old policy: {old}", verl_loss, dual, old) for old in ("own", "sampler", "noise")]
    return found


def compare(step: Path, model: Path, *, with_verl: bool, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """A row for each case: loss and gradient of both, and their difference."""
    from safetensors import safe_open

    with safe_open(step, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        settings = json.loads(file.metadata()["settings"])
    algorithm, temperature = AlgorithmConfig(**settings["algorithm"]), settings["temperature"] or 1.0
    compared = cases(algorithm, with_verl=with_verl)
    return [_compared(case, tensors, lambda: _language_model(model, dtype), temperature) for case in compared]


def _compared(
    case: Case, tensors: dict[str, torch.Tensor], loaded: Callable[[], Any], temperature: float
) -> dict[str, Any]:
    mask = tensors["loss_mask"][:, 1:]
    noise = NOISE * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))

    def old(own: torch.Tensor, sampler: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return {"own": own.detach(), "sampler": sampler, "noise": own.detach() + chosen}[case.old]

    language_model = loaded()
    logits = language_model(input_ids=tensors["input_ids"], use_cache=False).logits[:, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(-1, tensors["input_ids"][:, 1:, None])[..., 0]
    given = {
        "logprobs": logprobs,
        "old": old(logprobs, tensors["rollout_logprobs"][:, 1:], noise),
        "mask": mask,
        "advantages": tensors["advantages"][:, 1:],
    }
    theirs = case.theirs(case.algorithm, given)
    theirs.backward()
    their_gradient = _gradient(language_model)

    rows = _rows(tensors)
    counts, groups = [row.num_sampled_tokens for row in rows], [str(group) for group in tensors["groups"].tolist()]
    weights = token_weights(counts, groups, "token", constant_tokens=1)
    batch = collate([replace(row, token_weight=w) for row, w in zip(rows, weights, strict=True)])
    policy = Policy(loaded(), 1_024)
    logprobs_N, entropy_N = policy(batch, temperature)
    tokens = SampledTokens(
        logprobs_N=logprobs_N,
        entropy_N=entropy_N,
        old_logprobs_N=old(logprobs_N, batch.rollout_logprobs_N, noise[mask]),
        rollout_logprobs_N=batch.rollout_logprobs_N,
        advantages_N=batch.advantages_N,
        weights_N=batch.weights_N,
        rows_N=batch.rows_N,
    )
    ours, stats = policy_loss(tokens, case.algorithm, LOSSES["clipped"])
    ours.backward()
    our_gradient = _gradient(policy.language_model)
    apart = float((our_gradient - their_gradient).norm() / our_gradient.norm())
    return {
        "case": case.name,
        "rows": len(rows),
        "tokens": len(logprobs_N),
        "clipped_tokens": int(stats["clip_frac"]),
        "our_loss": float(ours.detach()),
        "their_loss": float(theirs.detach()),
        "gradient_norm": float(our_gradient.norm()),
        "relative_difference": apart,
        "equal": apart <= ALIKE,
    }


def _language_model(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()


def _gradient(model: Any) -> torch.Tensor:
    """The gradients of all parameters, concatenated, in float64."""
    return torch.cat([one.grad.double().flatten() for one in model.parameters() if one.grad is not None])


def _rows(tensors: dict[str, torch.Tensor]) -> list[TokenRow]:
    arrays = {name: values.numpy() for name, values in tensors.items()}
    rows: list[TokenRow] = []
    for number, length in enumerate(arrays["lengths"].tolist()):
        mask = arrays["loss_mask"][number, :length]
        of_row = {name: arrays[name][number, :length] for name in ("input_ids", "rollout_logprobs", "advantages")}
        advantages, logprobs = of_row["advantages"][mask], of_row["rollout_logprobs"]
        rows.append(TokenRow(str(number), of_row["input_ids"].astype("int32"), mask, advantages, logprobs))
    return rows


def first_difference(runs: Sequence[Path], stage: str) -> str:
    """The first rollout that only one run has, or sampled token that differs, in the order of steps and rollouts.

    Compares the steps that both runs have recorded; the line names the other steps. Raises `ConfigError` where no step
    is recorded in both.
    """
    files = [
        {int(path.stem.rpartition("-")[2]): path for path in (run / "trajectories").glob(f"{stage}-step-*.jsonl")}
        for run in runs
    ]
    common = sorted(set.intersection(*(set(of) for of in files)))
    if not common:
        raise ConfigError("--runs", f"no step of {stage} is recorded in both", "give --stage, or record more steps")
    alone = [
        f"; only {run} has recorded {', '.join(f'step {step}' for step in sorted(of.keys() - set(common)))}"
        for run, of in zip(runs, files, strict=True)
        if len(of) > len(common)
    ]
    found = f"{len(common)} recorded steps are equal token by token"
    for equal, step in enumerate(common):
        if difference := _step_difference(runs, [of[step] for of in files]):
            found = f"{difference}; {equal} steps are equal"
            break
    return found + "".join(alone)


def _step_difference(runs: Sequence[Path], files: Sequence[Path]) -> str:
    """The first difference between two files of one step; empty where they are equal token by token."""
    ours, theirs = ({row["rollout_id"]: row for row in read_rows(path)} for path in files)
    name = files[0].name
    for rollout in sorted(ours.keys() | theirs.keys()):
        if rollout not in ours or rollout not in theirs:
            return f"{name}: only {runs[0] if rollout in ours else runs[1]} has {rollout}"
        pair = [[token for turn in of[rollout]["turns"] for token in turn["completion_ids"]] for of in (ours, theirs)]
        if pair[0] != pair[1]:
            place = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
            return f"{name}: {rollout} differs first in sampled token {place}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if all gradients are equal, 1 if one is not, 2 if they cannot be compared."""

    def act() -> int:
        options = options_of(ParityOptions, argv, description=__doc__)
        if options.runs:
            require(len(options.runs) == 2, "--runs", f"gives {len(options.runs)} folders", "give two run directories")
            print(first_difference(options.runs, options.stage))
            return 0
        if options.step is None or options.model is None:
            raise ConfigError("STEP", "a step needs --model", "give the exported step and the policy before it")
        with_verl = importlib.util.find_spec("verl") is not None
        if not with_verl:
            logging.getLogger(__name__).warning("verl is not on PYTHONPATH: its loss is left out")
        dtype = getattr(torch, options.dtype)
        found = compare(options.step, options.model, with_verl=with_verl, dtype=dtype)
        for row in found:
            print(json.dumps(row))
        return 0 if all(row["equal"] for row in found) else 1

    return status_of(act)


if __name__ == "__main__":
    sys.exit(main())
