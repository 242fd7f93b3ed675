"""Weights by IPC: a learner's rank fills one buffer on its GPU repeatedly, and that GPU's engine reads it in place.

The receiver is vLLM's `IPCWeightTransferEngine` in its packed form (`actors.weights.vllm_worker`), which opens the
buffer once per version and has copied a bucket when it answers. vLLM's sender is not used: it sends from one rank for
all, so an engine that hangs or dies would fail the version for every engine. Here each rank waits only for its own
engine, with a deadline.
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

BY_HANDLE = "ipc"  # a parcel's way of transfer
EXPANDABLE = "expandable_segments:True"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Torch uses the first variable that is set."""


class IpcTransfer:
    """Sends from one rank to the engine on its GPU."""

    def __init__(self, exporter: "CudaExporter", deadline_s: float) -> None:
        """`deadline_s`: limit for each answer of the engine."""
        self._exporter = exporter
        self._deadline_s = deadline_s

    def send(self, weights: ServedWeights, version: int, engines: Sequence[EngineLine]) -> Publication:
        """Send to the engine of this rank's GPU; a rank without an engine only takes part in the gathers."""
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
            deque(buckets, maxlen=0)  # the gathers are collectives: the other ranks run them to the end
            return Publication(policy_version=version, way="ipc", failed={name: str(failed)})
        finally:
            room = buckets = bucket = None  # free the memory, which an error's traceback would keep too
            self._exporter.release()
        num_bytes = sum(map(size_of, plan))
        return Publication(policy_version=version, way="ipc", checksum=total, num_bytes=num_bytes, took={name: took})


class CudaExporter:
    """GPU memory that another process of the node can open, by torch's IPC of CUDA or HIP."""

    def room(self, num_bytes: int) -> Tensor:
        """Allocate the buffer of one version, outside expandable segments: their handles are file descriptors, which
        containers do not let other processes open."""
        settings = next((found for name in ALLOCATOR if (found := os.environ.get(name))), "")
        if EXPANDABLE not in settings:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        # The call resets settings that it does not name to torch's defaults, so it passes all of them.
        torch._C._accelerator_setAllocatorSettings(settings.replace(EXPANDABLE, "expandable_segments:False"))
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        finally:
            torch._C._accelerator_setAllocatorSettings(settings)

    def export(self, room: Tensor) -> dict[str, Any]:
        """A handle for one opening, as plain values: vLLM's front end encodes it with msgpack."""
        from torch.multiprocessing.reductions import reduce_tensor

        arguments: Any = reduce_tensor(room)[1]
        return {"gpu": gpu_id(room.device), "num_bytes": len(room), "storage": list(arguments[7:])}

    def ready(self) -> None:
        """Wait until earlier writes are visible to other processes."""
        torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        """Free exported memory that the other process has closed."""
        torch.cuda.ipc_collect()


def opening(handle: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Arguments of torch's `rebuild_cuda_tensor`, with which vLLM opens the memory, by GPU.

    vLLM replaces the 0 by the GPU's index in the opening process.
    """
    size, typed = torch.Size([handle["num_bytes"]]), torch.storage.TypedStorage
    return {handle["gpu"]: (torch.Tensor, size, (1,), 0, typed, torch.uint8, 0, *handle["storage"])}


def layout(entries: Sequence[WeightEntry]) -> dict[str, list[Any]]:
    """A bucket in vLLM's packed form, which has no gaps: padding becomes a parameter without a name."""
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
    """The GPU's UUID, which does not depend on a process's visible devices."""
    return str(torch.cuda.get_device_properties(device).uuid)
