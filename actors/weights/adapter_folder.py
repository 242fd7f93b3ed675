"""LoRA adapters for engines: names, shapes, and the PEFT folder that vLLM and PEFT load them from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.weights.model_parameters import Shapes, linear_layers

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's prefix of layer names; no parameter of a model starts with it."""


def adapter_name(layer: str, matrix: str) -> str:
    """PEFT's name of a layer's matrix "A" or "B"."""
    return f"{PREFIX}{layer}.lora_{matrix}.weight"


def is_adapter(name: str) -> bool:
    """Whether a published weight belongs to an adapter and not to the model."""
    return name.startswith(PREFIX)


def adapter_shapes(model: Path, rank: int) -> Shapes:
    """Shapes of the adapter matrices for every linear layer of the model except the output head."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (num_outputs, num_inputs) in linear_layers(model).items():
        shapes[adapter_name(layer, "A")] = (rank, num_inputs)
        shapes[adapter_name(layer, "B")] = (num_outputs, rank)
    return shapes


def target_modules(model: Path) -> list[str]:
    """The last parts of the adapted layers' names, such as q_proj."""
    return sorted({layer.rpartition(".")[2] for layer in linear_layers(model)})


def adapter_beside(model: Path) -> Path:
    """The adapter folder next to an exported model."""
    return model.with_name("adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """An adapter that an engine serves beside a model's weights."""

    base: str  # the model's folder
    rank: int
    alpha: int
    folder: str = ""  # initial PEFT adapter; empty: a zero adapter until the first published version


def saved_adapter(model: Path) -> AdapterSettings | None:
    """The adapter that an exported model was merged with; None for other models, or if its base model is missing."""
    folder = adapter_beside(model)
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        base = config["base_model_name_or_path"]
    except (OSError, ValueError, KeyError):
        return None
    if not base or not (Path(base) / "config.json").is_file():
        return None
    return AdapterSettings(base=base, rank=config["r"], alpha=config["lora_alpha"], folder=str(folder))


def write_adapter(
    folder: Path, tensors: "Mapping[str, Tensor]", *, base: str, rank: int, alpha: int, targets: Sequence[str]
) -> list[Path]:
    """Write a PEFT adapter folder and return its files. The tensors must not share memory.

    `base`: folder of the base model. `targets`: last parts of the adapted layers' names.
    """
    from safetensors.torch import save_file

    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS]
    paths[0].write_text(json.dumps(config, indent=1))
    save_file(dict(tensors), paths[1], metadata={"format": "pt"})
    paths[1].chmod(0o644)  # safetensors makes it readable by its owner only
    return paths
