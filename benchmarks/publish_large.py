"""Loads large random weights into a real engine; compares gather, move and load with a memory copy of the bytes.

The publisher has no optimizer and no ranks: its weights are whole in this process, as with ZeRO 0 to 2.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.generation.engine import Engine
from actors.weights.buckets import WeightBucket, WeightEntry, checksum
from actors.weights.model_parameters import SavedWeights
from actors.weights.random_weights import write_random_weights
from actors.weights.tensors import ServedWeights
from benchmarks.small import SMALL
from rstar_ray.config import with_values

VOCABULARY = 32_000
LAYER_PARAMETERS = 50_335_744
SHAPE = {
    "hidden_size": 2_048,
    "intermediate_size": 6_144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2_048,
}
"""The layers of Qwen3-1.7B."""
CHANGED = {"engine.kv_tokens": 4_096, "engine.max_running": 8, "engine.dtype": "bfloat16"}


async def large(parameters: float, publishes: int) -> dict[str, Any]:
    """Seconds of each part, the smallest of `publishes`, and the pause over a copy of the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        weights = _random_model(Path(folder), parameters)
        config = with_values(SMALL, CHANGED)
        engine = Engine(config, Path(folder))
        rounds: list[dict[str, float]] = []
        num_bytes = 0

        def entries() -> Iterator[WeightEntry]:
            return (WeightEntry(name, tuple(one.shape), "bfloat16", 0) for name, one in weights.items())

        def gather(group_bytes: int, everywhere: bool) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(weights.items())

        try:
            await engine.start()
            for version in range(1, publishes + 1):
                started = time.perf_counter()
                served = ServedWeights(entries, gather, config.learner.bucket_bytes, everywhere=False)
                buckets = list(served.on_host())
                total = checksum(buckets)
                gathered = time.perf_counter()
                update = await engine.weights.update(version, buckets)
                assert update.checksum == total
                parts = {"gather": gathered - started, "move": update.move_s, "load": update.load_s}
                num_bytes = sum(bucket.num_bytes for bucket in buckets)
                rounds.append(parts | {"copy": _copy_seconds(buckets)})
        finally:
            await engine.close()
    least = {part: min(one[part] for one in rounds) for part in rounds[0]}
    return {
        "benchmark": "publish_large",
        "device": "cpu",
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "bytes": num_bytes,
        "publishes": publishes,
        "seconds": {part: round(seconds, 3) for part, seconds in least.items()},
        "gb_per_s": {part: round(num_bytes / seconds / 1e9, 2) for part, seconds in least.items()},
        "pause_over_copy": round(statistics.median(one["load"] / one["copy"] for one in rounds), 2),
    }


def _random_model(folder: Path, parameters: float) -> dict[str, torch.Tensor]:
    """Write a model of about this many parameters, at least one layer; returns the weights by name."""
    layers = max(1, round((parameters - VOCABULARY * SHAPE["hidden_size"]) / LAYER_PARAMETERS))
    config = {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16"}
    config |= {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "tie_word_embeddings": True, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    write_random_weights(folder, torch.bfloat16)
    saved = SavedWeights(folder)
    return {name: saved.tensor(name) for name in saved.shapes()}


def _copy_seconds(buckets: Sequence[WeightBucket]) -> float:
    """Copy into memory that is already mapped, as an engine's weights are."""
    there = [np.ones_like(bucket.data) for bucket in buckets]
    started = time.perf_counter()
    for bucket, own in zip(buckets, there, strict=True):
        np.copyto(own, bucket.data)
    return time.perf_counter() - started
