"""The LoRA adapter that an engine serves with its model's weights, in a PEFT folder that vLLM loads.

Every request names the same adapter, and each version replaces its matrices: a running request continues with the new
ones, as with new weights. vLLM's prefix cache identifies an adapter by its name, so the cache is emptied with each
version, or requests have the salts of their draws (`--staleness`).
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actors.weights.adapter_folder import (
    AdapterSettings,
    adapter_shapes,
    is_adapter,
    saved_adapter,
    target_modules,
    write_adapter,
)
from actors.weights.buckets import WeightBucket
from actors.weights.model_parameters import Shapes
from rstar_ray.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.lora.request import LoRARequest

NAME, ID = "policy", 1


def adapter_to_serve(config: RunConfig, model: Path, *, trained: bool) -> AdapterSettings | None:
    """The adapter that an engine serves with the policy in the folder `model`.

    If the policy is `trained`, it is the learner's. Otherwise it is the adapter that was merged into the folder's
    weights (in bfloat16 merging rounds most of an adapter away); None if the engine uses float32.
    """
    if trained:
        rank, alpha = config.learner.lora_rank, config.learner.lora_alpha
        return AdapterSettings(base=str(model), rank=rank, alpha=alpha) if rank else None
    return saved_adapter(model.absolute()) if config.engine.dtype != "float32" else None


class ServedAdapter:
    """The adapter of one engine. Call `create` first."""

    def __init__(self, settings: AdapterSettings, dtype: str) -> None:
        self._settings = settings
        self._model = Path(settings.base)
        self._dtype = dtype
        self._folder: Path | None = None

    @property
    def shapes(self) -> Shapes:
        """Shapes of a version's matrices, by name."""
        return adapter_shapes(self._model, self._settings.rank)

    @property
    def request(self) -> "LoRARequest":
        """vLLM's request object, which names the adapter in a completion."""
        from vllm.lora.request import LoRARequest

        assert self._folder is not None, "create() comes first"
        return LoRARequest(NAME, ID, str(self._folder))

    @property
    def loading(self) -> "LoRARequest":
        """vLLM's request to load the last written matrices in place of the current ones."""
        request = self.request
        request.load_inplace = True
        return request

    def create(self, folder: Path) -> None:
        """Write the initial adapter to `folder`, which must not exist."""
        import torch

        self._folder = folder
        if self._settings.folder:
            shutil.copytree(self._settings.folder, folder)
            return
        dtype = getattr(torch, self._dtype)
        self._write({name: torch.zeros(shape, dtype=dtype) for name, shape in self.shapes.items()})

    def write(self, buckets: Sequence[WeightBucket]) -> None:
        """Write the matrices of a version; vLLM reads them when it loads the adapter."""
        import torch

        from actors.weights.tensors import TensorBucket

        tensors: dict[str, Tensor] = {}
        for bucket in buckets:
            if any(is_adapter(entry.name) for entry in bucket.entries):
                copied = TensorBucket(bucket.entries, torch.from_numpy(bucket.data.copy()))
                tensors |= {name: tensor.clone() for name, tensor in copied.weights() if is_adapter(name)}
        self._write(tensors)

    def _write(self, tensors: "Mapping[str, Tensor]") -> None:
        assert self._folder is not None, "create() comes first"
        write_adapter(
            self._folder,
            tensors,
            base=self._settings.base,
            rank=self._settings.rank,
            alpha=self._settings.alpha,
            targets=target_modules(self._model),
        )
