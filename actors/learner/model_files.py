"""The policy as an ordinary Hugging Face folder: written, and taken over."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from actors.learner.checkpoint import SHARD_BYTES, refuse_other_shapes
from actors.learner.policy import Policy
from actors.weights.model_folder import SavedWeights
from actors.weights.tensors import as_tensor

if TYPE_CHECKING:
    from actors.learner.state import LearnerState

NOT_WEIGHTS = ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")


def export(folder: Path, policy: Policy, state: "LearnerState", *, source: Path) -> None:
    """Safetensors, config and generation config, and the tokenizer of `source`; a collective, written by rank 0."""
    tensors = {p.name: as_tensor(p).clone() for p in state.served(SHARD_BYTES)}
    if dist.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    policy.language_model.save_pretrained(folder, state_dict=tensors)
    for pattern in NOT_WEIGHTS:
        for file in sorted(source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
    for written in folder.glob("*.safetensors"):
        written.chmod(0o644)  # safetensors leaves them readable by their owner alone


def take_over(folder: Path, policy: Policy, state: "LearnerState") -> None:
    """The weights of a folder of the same architecture, one tensor at a time; a collective, read by rank 0.

    Raises `ConfigError`, on all ranks, where a parameter is missing or of another shape.
    """
    reads = dist.get_rank() == 0
    saved = SavedWeights(folder) if reads else None
    expected = state.served_shapes
    shapes = {name: shape for name, shape in saved.shapes().items() if name in expected} if saved is not None else {}
    refuse_other_shapes(shapes, expected, option="--model", name=str(folder), ours=policy.architecture)
    for name in expected:
        state.set_served(name, saved.tensor(name) if saved is not None else None)
