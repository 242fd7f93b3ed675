"""Random weights for a model that has only a config.json, for tests of sizes and speed."""

import json
from pathlib import Path

import torch
from torch import Tensor

from actors.weights.model_parameters import INDEX, parameter_shapes

SPREAD = 0.02
SHARD_BYTES = 2 * 2**30


def write_random_weights(folder: Path, dtype: torch.dtype, *, seed: int = 0) -> int:
    """Write the parameters that the folder's config.json describes, in safetensors of about `SHARD_BYTES`.

    Returns the number of parameters. Only one file's weights are in memory at a time.
    """
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    shard: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    shards = size = total = 0
    shapes = parameter_shapes(folder)
    for name, shape in shapes.items():
        shard[name] = torch.empty(shape, dtype=dtype).uniform_(-SPREAD, SPREAD, generator=generator)
        size += shard[name].nbytes
        total += shard[name].numel()
        if size >= SHARD_BYTES or len(where) + len(shard) == len(shapes):
            file = f"model-{shards:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(shard, file)
            shard, shards, size = {}, shards + 1, 0
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_parameters": total}, "weight_map": where}))
    return total
