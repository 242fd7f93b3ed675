"""Weights by IPC: a learner's rank fills one buffer on its GPU again and again, and the engine there reads it in place.

The buffer is exported once a version and opened once (vLLM's `PackedBufferImporter`): torch counts one opening for an
export, and what is counted otherwise never comes back (vLLM #52950). The engine has copied a bucket when it answers.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.generation.vllm_private import buffer_importer
from actors.weights.buckets import as_rows, size_of
from actors.weights.tensors import ServedWeights, add_checksum
from actors.weights.transfer import EngineLine, Publication, answer
from rstar_ray.errors import RStarError, TransferError

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
                total = add_checksum(bucket, total)
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
        """Plain values by which it is opened, once."""
        from torch.multiprocessing.reductions import reduce_tensor

        arguments: Any = reduce_tensor(room)[1]
        (_, size, stride, offset, _, _, _, *of_storage) = arguments
        handle, storage_bytes, storage_offset, _, counter, counter_offset, event, event_sync = of_storage
        return {
            "gpu": gpu_id(room.device),
            "size": list(size),
            "stride": list(stride),
            "offset": offset,
            "handle": handle,
            "storage_bytes": storage_bytes,
            "storage_offset": storage_offset,
            "counter": counter,
            "counter_offset": counter_offset,
            "event": event,
            "event_sync": event_sync,
        }

    def ready(self) -> None:
        """What was written is there for others."""
        torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        """The other process has closed it."""
        torch.cuda.ipc_collect()


class CudaOpener:
    """Memory that another process of this GPU has exported; vLLM counts what is open."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._importer: Any = None

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        """All of it, uint8; the same handle is opened once."""
        own = gpu_id(self._device)
        if handle["gpu"] != own:
            raise TransferError(f"weights lie on GPU {handle['gpu']}, and this engine is on {own}")
        if self._importer is None:
            self._importer = buffer_importer()
        return self._importer.rebuild(rebuilt(handle, self._device.index or 0))

    def close(self) -> None:
        """Close what is open."""
        if self._importer is not None:
            self._importer.close()


def rebuilt(handle: Mapping[str, Any], device_index: int) -> list[Any]:
    """Torch's arguments of `rebuild_cuda_tensor`, with this process's number for the GPU; all can be hashed."""
    return [
        torch.Tensor,
        torch.Size(handle["size"]),
        tuple(handle["stride"]),
        handle["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        device_index,
        handle["handle"],
        handle["storage_bytes"],
        handle["storage_offset"],
        False,  # no gradients
        handle["counter"],
        handle["counter_offset"],
        handle["event"],
        handle["event_sync"],
    ]


def gpu_id(device: torch.device) -> str:
    """The same in every process, whatever its mask."""
    return str(torch.cuda.get_device_properties(device).uuid)
