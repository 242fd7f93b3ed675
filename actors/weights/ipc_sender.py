"""The sending end of IPC: a rank fills one buffer on its GPU, again and again, and the engine there reads it in place.

The buffer is exported once a version and opened once (vLLM's `PackedBufferImporter`): torch counts one opening for an
export, and what is counted otherwise never comes back (vLLM #52950). The engine has copied a bucket when it answers.
"""

import os
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.weights.buckets import size_of
from actors.weights.collective_sender import plain
from actors.weights.tensors import add_checksum
from actors.weights.transfer import EngineLine, Sent, Weights, answer
from rstar_ray.errors import RStarError

BY_HANDLE = "ipc"  # what a parcel says of how its weights come
EXPANDABLE = "expandable_segments:True"  # in PYTORCH_ALLOC_CONF, as deploy/*.env have it


class Exporter(Protocol):
    """Memory that another process of this node can open."""

    def room(self, num_bytes: int) -> Tensor:
        """Of uint8, for one version."""
        ...

    def export(self, room: Tensor) -> dict[str, Any]:
        """Plain values by which it is opened, once."""
        ...

    def ready(self) -> None:
        """What was written is there for others."""
        ...

    def release(self) -> None:
        """The other process has let go of it."""
        ...


class IpcTransfer:
    """One rank and the engine on its GPU."""

    def __init__(self, exporter: Exporter, deadline_s: float) -> None:
        """`deadline_s`: for any one answer of the engine."""
        self._exporter = exporter
        self._deadline_s = deadline_s

    def send(self, weights: Weights, version: int, engines: Sequence[EngineLine]) -> Sent:
        if not engines:
            weights.take_part()
            return Sent()
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
                taking = engine.take({"by": BY_HANDLE, "buckets": plain((bucket.entries,)), "handle": handle})
                total = add_checksum(bucket, total)
                reason = f"loading bucket {number + 1} of {len(plan)}"
                answer(taking, self._deadline_s, owner=name, reason=reason)
            took = answer(engine.end(), self._deadline_s, owner=name, reason="ending an update")
        except RStarError as failed:
            deque(buckets, maxlen=0)  # the other ranks gather to the end
            return Sent(failed={name: str(failed)})
        finally:
            room = buckets = bucket = None  # nothing here holds the memory any more, nor a frame of an error's
            self._exporter.release()
        return Sent(checksum=total, num_bytes=sum(map(size_of, plan)), took={name: took})


class CudaExporter:
    """Of this process's GPU, by torch (CUDA's IPC, or HIP's)."""

    def room(self, num_bytes: int) -> Tensor:
        """Not in an expandable segment: its handles are file descriptors, which containers do not let others take."""
        expandable = EXPANDABLE in os.environ.get("PYTORCH_ALLOC_CONF", "")
        if expandable:
            torch._C._accelerator_setAllocatorSettings(EXPANDABLE.replace("True", "False"))
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        finally:
            if expandable:
                torch._C._accelerator_setAllocatorSettings(EXPANDABLE)

    def export(self, room: Tensor) -> dict[str, Any]:
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
        torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        torch.cuda.ipc_collect()


def gpu_id(device: torch.device) -> str:
    """The same in every process, whatever its mask."""
    return str(torch.cuda.get_device_properties(device).uuid)
