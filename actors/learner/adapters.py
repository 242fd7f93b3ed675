"""LoRA (arXiv:2106.09685) through PEFT: small matrices trained beside frozen weights.

An adapted layer computes W x + s B A x, with s = alpha / rank. B starts as zeros: a fresh adapter changes nothing.
Engines receive A and B and compute the same sum. An exported model has W + s B A in float32: bfloat16 would round most
of s B A away.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rstar_ray.config import LearnerConfig

ADAPTER = "default"  # PEFT's name for the only one
_OWN = ".base_layer"  # PEFT puts the layer that was there under this name, its bias too
_BASE, _A, _B = f"{_OWN}.weight", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


@dataclass(frozen=True, slots=True)
class Adapted:
    """The parameters of one adapted layer: its frozen weight and its adapter's two matrices."""

    base: str
    a: str
    b: str
    scale: float


def add_adapters(language_model: Any, learner: LearnerConfig) -> None:
    """Adapters for every linear layer but the head; everything else is frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=learner.lora_rank, lora_alpha=learner.lora_alpha, lora_dropout=0.0, bias="none", target_modules="all-linear"
    )
    inject_adapter_in_model(config, language_model, adapter_name=ADAPTER)


def adapted_weights(model: nn.Module) -> dict[str, Adapted]:
    """By the weight's name in a model folder; empty where nothing is adapted."""
    modules = dict(model.named_modules())
    found: dict[str, Adapted] = {}
    for name, _ in model.named_parameters():
        if name.endswith(_BASE):
            layer = name.removesuffix(_BASE)
            scale = float(modules[layer].scaling[ADAPTER])  # type: ignore[index,union-attr]
            found[f"{layer}.weight"] = Adapted(name, layer + _A, layer + _B, scale)
    return found


def frozen_biases(model: nn.Module) -> dict[str, str]:
    """The biases of adapted layers, which no adapter changes: by their names in a model folder."""
    names = (name for name, _ in model.named_parameters() if name.endswith(f"{_OWN}.bias"))
    return {name.removesuffix(f"{_OWN}.bias") + ".bias": name for name in names}


def is_adapters(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return name.endswith((_A, _B))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A in float32."""
    with torch.no_grad():
        return weight.float() + scale * (b.float() @ a.float())
