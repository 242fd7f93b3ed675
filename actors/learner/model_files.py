"""Writes the policy as a Hugging Face model folder, and loads weights from one."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from actors.learner.checkpoint import refuse_other_shapes
from actors.learner.policy import Policy
from actors.weights.adapter_folder import adapter_beside, target_modules, write_adapter
from actors.weights.model_parameters import SavedWeights
from rstar_ray.config import LearnerConfig

if TYPE_CHECKING:
    from actors.learner.state import LearnerState

GATHERED_BYTES = 2 * 2**30
"""Bytes of weights that ZeRO-3 gathers at a time."""
NOT_WEIGHTS = (
    *("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    "generation_config.json",
)


def export(
    folder: Path, policy: Policy, state: "LearnerState", learner: LearnerConfig, *, source: Path, base: str
) -> Callable[[], Sequence[Path]] | None:
    """Copy the weights to host memory; returns the function that writes the folder (rank 0), or None. A collective.

    Tokenizer and generation config are copied from the folder `source`. With LoRA, the folder contains the merged model
    in float32, and `adapter` beside it is a PEFT folder whose base model is `base`.
    """
    tensors = _on_host(state.whole_model(GATHERED_BYTES))
    adapter = _on_host(state.adapter(GATHERED_BYTES)) if learner.lora_rank else {}
    if dist.get_rank() != 0:
        return None

    def write() -> list[Path]:
        written = _write(folder, policy, tensors, source)
        if adapter:
            _name_dtype(folder / "config.json", next(iter(tensors.values())).dtype)
            written += write_adapter(
                adapter_beside(folder),
                adapter,
                base=base,
                rank=learner.lora_rank,
                alpha=learner.lora_alpha,
                targets=target_modules(source),
            )
        return written

    return write


def _on_host(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}


def _write(folder: Path, policy: Policy, tensors: dict[str, Tensor], source: Path) -> list[Path]:
    """Write safetensors and config; copy tokenizer and generation config from `source` unchanged.

    The generation config is copied because transformers loads some that it refuses to save (a temperature with sampling
    off).
    """
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    policy.language_model.generation_config = GenerationConfig()
    policy.language_model.save_pretrained(folder, state_dict=tensors)
    for pattern in NOT_WEIGHTS:
        for file in sorted(source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
    for written in folder.glob("*.safetensors"):
        written.chmod(0o644)  # safetensors makes them readable by the owner only
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Set the dtype in config.json: transformers wrote that of the model in memory, not of the merged weights."""
    content = json.loads(config.read_text())
    content["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def take_over(folder: Path, policy: Policy, state: "LearnerState") -> None:
    """Load the weights of a folder of the same architecture, one tensor at a time; a collective, rank 0 reads.

    Raises `ConfigError` on all ranks if a parameter is missing or has another shape.
    """
    reads = dist.get_rank() == 0
    saved = SavedWeights(folder) if reads else None
    expected = state.folder_shapes
    shapes = {name: shape for name, shape in saved.shapes().items() if name in expected} if saved is not None else {}
    refuse_other_shapes(shapes, expected, option="--model", name=str(folder), ours=policy.architecture)
    for name in expected:
        state.set_model_weight(name, saved.tensor(name) if saved is not None else None)
