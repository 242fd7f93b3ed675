"""Weights by IPC: a learner's rank fills one buffer on its GPU again and again, and the engine there reads it in place.

The engine's end is vLLM's `IPCWeightTransferEngine` in its packed form (`actors.weights.vllm_worker`), which opens the
buffer once a version and has copied a bucket when it answers. Its trainer's end is not used: there one rank sends for
all, and an engine that hangs or dies would end the version for every engine. Here each rank waits for its own engine
alone, with a deadline.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.weights.buckets import WeightEntry, as_rows, size_of
from actors.weights.tensors import ServedWeights, add_checksum
from actors.weights.transfer import EngineLine, Publication, answer
from rstar_ray.errors import RStarError

BY_HANDLE = "ipc"  # how the weights of a parcel come
EXPANDABLE = "expandable_segments:True"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Torch takes the first that is set."""


class IpcTransfer:
    """One rank and the engine on its GPU."""

    def __init__(self, exporter: "CudaExporter", deadline_s: float) -> None:
        """`deadline_s`: for any one answer of the engine."""
        self._exporter = exporter
        self._deadline_s = deadline_s

    def send(self, weights: ServedWeights, version: int, engines: Sequence[EngineLine]) -> Publication:
        """To the engine of this rank's GPU. A rank without one gathers with the others."""
        if not engines:
            weights.take_part()
            return Publication(policy_version=version, way="ipc")
        (engine,) = engines
        plan = weights.plan
        room = self._exporter.room(max(map(size_of, plan)))
        buckets = weights.on_device(room)
        name = engine.seat.name
        total, bucket = 0, None
        try:
            handle = self._exporter.export(room)
            answer(engine.begin(version, plan), self._deadline_s, owner=name, reason="beginning an update")
            for number, bucket in enumerate(buckets):
                self._exporter.ready()
                taking = engine.take({"by": BY_HANDLE, "buckets": as_rows((bucket.entries,)), "handle": handle})
                total = add_checksum(bucket.weights(), total)
                reason = f"loading bucket {number + 1} of {len(plan)}"
                answer(taking, self._deadline_s, owner=name, reason=reason)
            took = answer(engine.end(), self._deadline_s, owner=name, reason="ending an update")
        except RStarError as failed:
            deque(buckets, maxlen=0)  # the other ranks gather to the end
            return Publication(policy_version=version, way="ipc", failed={name: str(failed)})
        finally:
            room = buckets = bucket = None  # nothing here holds the memory any more, nor a frame of an error's
            self._exporter.release()
        num_bytes = sum(map(size_of, plan))
        return Publication(policy_version=version, way="ipc", checksum=total, num_bytes=num_bytes, took={name: took})


class CudaExporter:
    """Memory on this process's GPU that another process of the node can open, by torch (CUDA's IPC, or HIP's)."""

    def room(self, num_bytes: int) -> Tensor:
        """For one version. Not in an expandable segment: handles of these are file descriptors, which containers do
        not let other processes take."""
        settings = next((found for name in ALLOCATOR if (found := os.environ.get(name))), "")
        if EXPANDABLE not in settings:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        # Settings that are not named in the call fall back to torch's defaults.
        torch._C._accelerator_setAllocatorSettings(settings.replace(EXPANDABLE, "expandable_segments:False"))
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        finally:
            torch._C._accelerator_setAllocatorSettings(settings)

    def export(self, room: Tensor) -> dict[str, Any]:
        """Plain values by which it is opened, once; vLLM's front end passes nothing else on (`msgpack`)."""
        from torch.multiprocessing.reductions import reduce_tensor

        arguments: Any = reduce_tensor(room)[1]
        return {"gpu": gpu_id(room.device), "num_bytes": len(room), "storage": list(arguments[7:])}

    def ready(self) -> None:
        """What was written is there for others."""
        torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        """The other process has closed it."""
        torch.cuda.ipc_collect()


def opening(handle: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What vLLM opens the memory by: the arguments of torch's `rebuild_cuda_tensor`, by GPU.

    vLLM puts the process's own number of the GPU in the place of the 0.
    """
    size, typed = torch.Size([handle["num_bytes"]]), torch.storage.TypedStorage
    return {handle["gpu"]: (torch.Tensor, size, (1,), 0, typed, torch.uint8, 0, *handle["storage"])}


def layout(entries: Sequence[WeightEntry]) -> dict[str, list[Any]]:
    """A bucket as vLLM reads it: parameters side by side, where bytes between them are a parameter without a name."""
    rows: list[tuple[str, str, list[int], int]] = []
    end = 0
    for entry in entries:
        if gap := entry.offset_bytes - end:
            rows.append(("", "uint8", [gap], gap))
        rows.append((entry.name, entry.dtype, list(entry.shape), entry.num_bytes))
        end = entry.offset_bytes + entry.num_bytes
    names, dtypes, shapes, sizes = map(list, zip(*rows, strict=True))
    return {"names": names, "dtype_names": dtypes, "shapes": shapes, "tensor_sizes": sizes}


def gpu_id(device: torch.device) -> str:
    """The same in every process, whatever its mask."""
    return str(torch.cuda.get_device_properties(device).uuid)
