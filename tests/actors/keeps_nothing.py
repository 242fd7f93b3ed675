"""Run by a test in a process of its own: versions made ready in vLLM's own process leave nothing behind.

And one of which loading leaves something that could not be handed over is refused, and the model is as it was.
"""

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


def refused(worker: Any, folder: str) -> str:
    """What `NotPrepared` says where packing a layer leaves more than the packed weights."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from actors.weights.model_folder import SavedWeights
    from actors.weights.prepared import NotPrepared, PreparedWeights

    model: torch.nn.Module = worker.model_runner.model
    before = [(set(vars(module)), vars(module).get("cpu_linear")) for module in model.modules()]
    tensors = [parameter.clone() for parameter in model.parameters()]
    packing, saved = UnquantizedLinearMethod.process_weights_after_loading, SavedWeights(Path(folder))

    def and_more(method: Any, layer: torch.nn.Module) -> None:
        packing(method, layer)
        vars(layer)["as_it_was_saved"] = torch.zeros(1)

    UnquantizedLinearMethod.process_weights_after_loading = and_more  # type: ignore[method-assign]
    ready = PreparedWeights(model)
    try:
        ready.load((name, saved.tensor(name)) for name in saved.shapes())
        ready.finish()
    except NotPrepared as error:
        ready.release()
        assert before == [(set(vars(module)), vars(module).get("cpu_linear")) for module in model.modules()]
        assert all(torch.equal(*pair) for pair in zip(tensors, model.parameters(), strict=True))
        return str(error)
    finally:
        UnquantizedLinearMethod.process_weights_after_loading = packing
    return "it was not refused"


def main(folder: Path) -> None:
    from vllm import LLM

    folders = [str(make_tiny_model(folder / str(seed), seed=seed)) for seed in range(4)]
    engine = LLM(
        folders[0], skip_tokenizer_init=True, enforce_eager=True, kv_cache_memory_bytes=2**24, max_model_len=256
    )
    ((first, *later, left),) = engine.collective_rpc(versions, args=(folders,))
    assert later == [first] * len(folders) and left == 0, (first, later, left)
    print("nothing is left")
    (reason,) = engine.collective_rpc(refused, args=(folders[1],))
    assert "as_it_was_saved" in reason, reason
    print("nothing has changed")


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    main(Path(sys.argv[1]))
