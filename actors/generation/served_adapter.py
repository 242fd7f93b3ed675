"""The adapter that an engine serves beside its model's weights, as the PEFT folder that vLLM loads it from.

Every request names the same adapter, whose matrices each version replaces: a running request continues with
the new ones, as it would with new weights. vLLM's prefix cache takes an adapter's name for what it holds, so it must be
emptied with each version.
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

    Where the policy is trained, it is the learner's. Otherwise it is the one that the folder's weights were merged
    with, unless the engine is in float32: in bfloat16 merging rounds most of an adapter away.
    """
    if trained:
        rank, alpha = config.learner.lora_rank, config.learner.lora_alpha
        return AdapterSettings(base=str(model), rank=rank, alpha=alpha) if rank else None
    return saved_adapter(model.absolute()) if config.engine.dtype != "float32" else None


class ServedAdapter:
    """One engine's. `create` first, once the engine has a folder."""

    def __init__(self, settings: AdapterSettings, dtype: str) -> None:
        self._settings = settings
        self._model = Path(settings.base)
        self._dtype = dtype
        self._folder: Path | None = None

    @property
    def shapes(self) -> Shapes:
        """Of the matrices that each version brings, by their names."""
        return adapter_shapes(self._model, self._settings.rank)

    @property
    def request(self) -> "LoRARequest":
        """For a completion, and to load what was written."""
        from vllm.lora.request import LoRARequest

        assert self._folder is not None, "create() comes first"
        return LoRARequest(NAME, ID, str(self._folder))

    @property
    def loading(self) -> "LoRARequest":
        """Has vLLM load what was written last, over what it holds."""
        request = self.request
        request.load_inplace = True
        return request

    def create(self, folder: Path) -> None:
        """Write what the engine starts with to `folder`, which is its own."""
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
