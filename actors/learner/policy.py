"""The learner's policy: a Hugging Face causal LM that returns log-probabilities of given tokens."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from actors.learner import row_attention
from actors.learner.attention_kernels import head_dim_of
from actors.weights.model_parameters import refuse_misfit
from rstar_ray.algorithm.batch import MicroBatch, TokenRow, collate
from rstar_ray.algorithm.loss import token_logprobs
from rstar_ray.config import LearnerConfig
from rstar_ray.errors import ConfigError

BFLOAT16_DIFFERENCE = 0.1
"""Largest mean difference of log-probs between two correct forward passes in bfloat16 [nat]. An improbable token may
differ by more. Attention across rows, or scaled logits, change all tokens by about 1."""


class Policy(nn.Module):
    """A causal LM that returns log-probabilities of given tokens instead of logits."""

    def __init__(self, language_model: Any, chunk_tokens: int, *, float32_head: bool = False) -> None:
        super().__init__()
        head = language_model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or cast(Any, head.bias) is not None:
            raise ConfigError("--model", f"its output layer is {head}", "use a causal LM with a plain linear head")
        self.language_model = language_model
        language_model.set_output_embeddings(LogprobHead(head.weight, chunk_tokens, float32=float32_head))

    @property
    def architecture(self) -> str:
        """A readable description of the properties that a checkpoint must share with this model."""
        config = self.language_model.config
        name = (getattr(config, "architectures", None) or [type(self.language_model).__name__])[0]
        return (
            f"{name}(hidden {config.hidden_size}, layers {config.num_hidden_layers}, "
            f"heads {config.num_attention_heads}, vocabulary {config.vocab_size})"
        )

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each sampled token under the tempered distribution: two float32 [N]."""
        packed = self.language_model.config._attn_implementation == row_attention.NAME
        rows = {"row_lengths": batch.row_lengths} if packed else {}
        hidden_BTH = self.language_model.base_model(
            input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False, **rows
        ).last_hidden_state
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, batch.positions_N)
        return self.language_model.get_output_embeddings()(hidden_NH, batch.targets_N, temperature)


class LogprobHead(nn.Module):
    """The output layer; a separate module, so that ZeRO-3 gathers its weight when it is called."""

    def __init__(self, weight_VH: Tensor, chunk_tokens: int, *, float32: bool) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, weight_VH)
        self.chunk_tokens = chunk_tokens
        self.float32 = float32

    def forward(self, hidden: Tensor, targets_N: Tensor | None = None, temperature: float | None = None) -> Any:
        """With targets and a temperature, their log-probabilities and entropies; otherwise logits."""
        if targets_N is None or temperature is None:
            return nn.functional.linear(hidden, self.weight)
        return token_logprobs(
            hidden,
            self.weight,
            targets_N,
            chunk_tokens=self.chunk_tokens,
            temperature=temperature,
            float32_head=self.float32,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Properties of a started rank."""

    num_parameters: int
    max_context_tokens: int
    attention_tokens: float  # length at which attention costs as much as the rest of the model
    own_rules: Mapping[str, str] = field(default_factory=dict[str, str])  # digests of the modules of the user's rules


def rank_facts(policy: Policy, num_parameters: int) -> RankFacts:
    """Parameters, context limit, and the length at which attention costs as much as the rest."""
    config = policy.language_model.config
    width = config.num_attention_heads * head_dim_of(config) * config.num_hidden_layers
    return RankFacts(
        num_parameters=num_parameters,
        max_context_tokens=int(getattr(config, "max_position_embeddings", 2**31)),
        # Per token: 2 flops per parameter; attention to half the row on average, 2 * width flops per key.
        attention_tokens=num_parameters / width,
    )


def load_language_model(folder: Path, learner: LearnerConfig, way: AbstractContextManager[None] | None = None) -> Any:
    """Load the causal LM of a Hugging Face folder in the forward dtype, within `way`; by default on the CPU.

    Raises `ConfigError` if engines could not serve the weights that the learner would publish.
    """
    import transformers

    if not (folder / "config.json").is_file():
        raise ConfigError("--model", f"no model in {str(folder)!r}", "name a Hugging Face folder with a config.json")
    refuse_misfit(folder)
    transformers.utils.logging.disable_progress_bar()
    attention = row_attention.register() if learner.attention == row_attention.NAME else learner.attention
    with way or nullcontext():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, learner.dtype), attn_implementation=attention
        )
    head: Any = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    own_head = head is not None and head.weight is not embeddings.weight
    if model.config.tie_word_embeddings and own_head:
        raise ConfigError(
            "--model",
            f"config.json of {folder} ties the output head to the embeddings, but the weights have a different head",
            "set tie_word_embeddings to false if the head was trained, or remove the head from the weights",
        )
    return model


def use_liger(model: Any) -> None:
    """Replace norms, rotary embeddings and SwiGLU by Liger's fused kernels, through transformers' hook.

    Liger's losses stay off: `LogprobHead` computes log-probabilities in chunks. Raises `ConfigError` if the package is
    missing or has no kernels for this model.
    """
    from transformers.integrations.liger import apply_liger_kernel
    from transformers.utils.import_utils import is_liger_kernel_available

    option = "--learner.liger"
    if not is_liger_kernel_available():
        raise ConfigError(option, "the package liger-kernel is not installed", "install it, or give --learner.no-liger")
    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if model.config.model_type not in known:
        raise ConfigError(
            option, f"liger-kernel has no kernels for {model.config.model_type}", "give --learner.no-liger"
        )
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def refuse_changed_logits(policy: Policy, engine: Any, device: torch.device, learner: LearnerConfig) -> None:
    """Raises `ConfigError` for a model that scales or caps logits after its output layer, or mixes packed rows."""
    rows = [
        TokenRow(f"probe-{first}", np.arange(first, first + 8, dtype=np.int32), np.ones(8, np.bool_))
        for first in (1, 9)
    ]
    batch = collate(rows, packed=learner.packed).to(device)
    alone = [collate([row], packed=learner.packed).to(device) for row in rows]
    engine.eval()
    with torch.no_grad():
        packed_N, _ = policy(batch, 1.0)
        alone_N = torch.cat([policy(one, 1.0)[0] for one in alone])
        logits_NV = policy.language_model(input_ids=alone[0].input_ids_BT, use_cache=False).logits[0].float()
    engine.train()
    expected_N = logits_NV.log_softmax(-1).gather(-1, alone[0].targets_N[:, None])[:, 0]
    full_precision = policy.language_model.dtype == torch.float32
    if _mean_difference(alone_N[: len(expected_N)], expected_N) > (1e-3 if full_precision else BFLOAT16_DIFFERENCE):
        raise ConfigError(
            "--model",
            f"{policy.architecture} changes its logits after the output layer",
            "use a model whose logits are hidden @ weight",
        )
    if _mean_difference(packed_N, alone_N) > (1e-5 if full_precision else BFLOAT16_DIFFERENCE):
        raise ConfigError(
            "--learner.attention",
            f"{learner.attention} packs rows end to end, but {policy.architecture} mixes packed rows",
            "give sdpa",
        )


def _mean_difference(logprobs_N: Tensor, expected_N: Tensor) -> float:
    """Mean absolute difference in nats; infinite if a value is not finite."""
    return float((logprobs_N - expected_N).abs().nan_to_num(torch.inf).mean())
