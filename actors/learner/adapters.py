"""LoRA (arXiv:2106.09685) through PEFT: small matrices trained beside frozen weights.

An adapted layer computes W x + s B A x, with s = alpha / rank. B is initialized to zeros: a new adapter changes
nothing. Engines receive A and B and compute the same sum. An exported model has W + s B A in float32: in bfloat16, most
of s B A would be lost to rounding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rstar_ray.config import LearnerConfig

ADAPTER = "default"  # PEFT's default adapter name
_OWN = ".base_layer"  # PEFT renames the original layer, and so its weight and bias
_BASE, _A, _B = f"{_OWN}.weight", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


@dataclass(frozen=True, slots=True)
class Adapted:
    """The parameters of one adapted layer: its frozen weight and its adapter's two matrices."""

    base: str
    a: str
    b: str
    scale: float


def add_adapters(language_model: Any, learner: LearnerConfig) -> None:
    """Add adapters to every linear layer except the head; all other parameters are frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=learner.lora_rank, lora_alpha=learner.lora_alpha, lora_dropout=0.0, bias="none", target_modules="all-linear"
    )
    inject_adapter_in_model(config, language_model, adapter_name=ADAPTER)


def adapted_weights(model: nn.Module) -> dict[str, Adapted]:
    """Adapted layers by the weight's name in a model folder; empty without LoRA."""
    modules = dict(model.named_modules())
    found: dict[str, Adapted] = {}
    for name, _ in model.named_parameters():
        if name.endswith(_BASE):
            layer = name.removesuffix(_BASE)
            scale = float(modules[layer].scaling[ADAPTER])  # type: ignore[index,union-attr]
            found[f"{layer}.weight"] = Adapted(name, layer + _A, layer + _B, scale)
    return found


def frozen_biases(model: nn.Module) -> dict[str, str]:
    """Parameter names of the biases of adapted layers (always frozen), by their names in a model folder."""
    names = (name for name, _ in model.named_parameters() if name.endswith(f"{_OWN}.bias"))
    return {name.removesuffix(f"{_OWN}.bias") + ".bias": name for name in names}


def is_adapters(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((_A, _B))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A in float32."""
    with torch.no_grad():
        return weight.float() + scale * (b.float() @ a.float())
