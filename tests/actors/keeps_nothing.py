"""Run by a test in a process of its own: versions made ready in vLLM's own process leave nothing behind."""

import gc
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch

from rstar_ray.tiny.model import make_tiny_model


def versions(worker: Any, folders: list[str]) -> list[int]:
    """Layers that vLLM's reload remembers after each version, and copies that are still there at the end."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    from actors.weights.model_folder import SavedWeights
    from actors.weights.prepared import PreparedWeights

    remembered, copies = [len(LAYERWISE_INFO)], []
    model: torch.nn.Module = worker.model_runner.model
    for number, folder in enumerate(folders):
        ready, saved = PreparedWeights(model), SavedWeights(Path(folder))
        copies += [weakref.ref(copy) for copy in ready._all.values()]  # pyright: ignore[reportPrivateUsage]
        assert ready.load((name, saved.tensor(name)) for name in saved.shapes()) == {
            name for name, _ in model.named_parameters()
        }
        ready.finish()
        if number % 2:
            ready.release()  # one that nobody asked for in the end
        else:
            ready.hand_over()
        remembered.append(len(LAYERWISE_INFO))
    del ready
    gc.collect()
    return [*remembered, sum(copy() is not None for copy in copies)]


def main(folder: Path) -> None:
    from vllm import LLM

    folders = [str(make_tiny_model(folder / str(seed), seed=seed)) for seed in range(4)]
    engine = LLM(
        folders[0], skip_tokenizer_init=True, enforce_eager=True, kv_cache_memory_bytes=2**24, max_model_len=256
    )
    ((first, *later, left),) = engine.collective_rpc(versions, args=(folders,))
    assert later == [first] * len(folders) and left == 0, (first, later, left)
    print("nothing is left")


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    main(Path(sys.argv[1]))
