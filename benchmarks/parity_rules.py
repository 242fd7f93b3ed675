"""The policy losses of TRL and verl as rules of `--algorithm.loss`; `benchmarks/parity.py` compares them with ours.

python recipes/stage1.py --scale tiny --own-folder benchmarks --algorithm.loss parity_rules:trl

Both are imported when they are called; this file has none of their code. TRL is part of `make setup`. verl must be on
PYTHONPATH: pip install --no-deps --target build/verl verl tensordict omegaconf hydra-core codetiming pyvers orjson
antlr4-python3-runtime==4.9.3
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rstar_ray.algorithm.surrogate import SampledTokens
    from rstar_ray.config import AlgorithmConfig

TRL_NAMES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}


def trl(tokens: SampledTokens, algorithm: AlgorithmConfig) -> Tensor:
    """TRL's loss of a micro batch, normalised by the update's tokens (`--algorithm.normalisation token`)."""
    return _as_tokens(lambda one: trl_loss(algorithm, one), tokens)


def verl(tokens: SampledTokens, algorithm: AlgorithmConfig) -> Tensor:
    """verl's loss of a micro batch, normalised by the update's tokens. It has a dual clip, of 3 if ours has none."""
    return _as_tokens(lambda one: verl_loss(algorithm, one), tokens)


def _as_tokens(loss: Any, tokens: SampledTokens) -> Tensor:
    """A micro batch's whole loss as a loss per token [N], all on its first token: only the sum is used."""
    if not len(tokens.logprobs_N):
        return 0.0 * tokens.logprobs_N
    row = {"logprobs": tokens.logprobs_N, "old": tokens.old_logprobs_N, "advantages": tokens.advantages_N}
    one = {name: values[None] for name, values in row.items()}
    weight = tokens.weights_N[0]
    whole = loss({**one, "mask": torch.ones_like(one["old"], dtype=torch.bool), "num_tokens": 1 / weight})
    return torch.cat([(whole / weight)[None], 0.0 * tokens.logprobs_N[1:]])


def trl_loss(algorithm: AlgorithmConfig, tensors: Mapping[str, Any], *, loss_type: str = "", constant: int = 1) -> Any:
    """`GRPOTrainer._compute_loss` with given log-probs instead of a model.

    `tensors` are [rows, tokens]: `logprobs`, `old`, `mask`, `advantages` (or [rows]), and if they are used
    `entropy`, `ref`, `rollout`; `num_tokens` are those of the whole update.
    """
    mask = tensors["mask"]
    loss_type = loss_type or ("cispo" if algorithm.loss == "cispo" else TRL_NAMES[algorithm.normalisation])
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            tensors["logprobs"],
            tensors.get("entropy", mask.float()),
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if algorithm.loss == "gspo" else "token",
        loss_type=loss_type,
        beta=algorithm.kl_coefficient,
        epsilon_low=algorithm.clip_low,
        epsilon_high=algorithm.clip_high + (loss_type == "cispo"),  # for CISPO, TRL's is the cap of the ratio itself
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=algorithm.dual_clip or None,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        use_vllm="rollout" in tensors,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=constant,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, **_: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros(mask.shape),
        "completion_mask": mask.int(),
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors.get("ref"),
        "num_items_in_batch": tensors.get("num_tokens", mask.sum()),
    }
    if "rollout" in tensors:
        log_weights = tensors["old"] - tensors["rollout"]
        inputs["importance_sampling_ratio"] = log_weights.exp().clamp(max=algorithm.correction_cap)
    return _trl()._compute_loss(stand_in, None, inputs)


@cache
def _trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


def verl_loss(algorithm: AlgorithmConfig, tensors: Mapping[str, Any]) -> Any:
    """verl's `vanilla` policy loss; `tensors` as of `trl_loss`."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla  # pyright: ignore[reportMissingImports]

    mask = tensors["mask"]
    settings = _Settings(
        clip_ratio=algorithm.clip_low,
        clip_ratio_low=algorithm.clip_low,
        clip_ratio_high=algorithm.clip_high,
        clip_ratio_c=algorithm.dual_clip or 3.0,
        global_batch_info={"batch_num_tokens": tensors.get("num_tokens", mask.sum())},
    )
    return compute_policy_loss_vanilla(
        tensors["old"], tensors["logprobs"], tensors["advantages"], mask.float(), "token-mean", settings
    )[0]


class _Settings(dict[str, Any]):
    """Settings with access by attribute and by `get`, as in verl."""

    __getattr__ = dict.__getitem__
