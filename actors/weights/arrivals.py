"""The engine's end of each way that weights come by; runs in vLLM's worker processes.

What a bucket is loaded from must outlive the call: vLLM's layer-wise reload keeps views until a layer is whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.weights.buckets import WeightEntry, size_of
from actors.weights.collective import Collective, Meeting
from actors.weights.collective_sender import BY_BROADCAST
from actors.weights.ipc_sender import BY_HANDLE, gpu_id
from actors.weights.shared_memory import BY_FILE, from_payload, open_buckets
from actors.weights.tensors import TensorBucket
from rstar_ray.errors import TransferError


class Opener(Protocol):
    """Memory of another process, as `actors.weights.ipc_sender.Exporter` has exported it."""

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        """All of it, uint8; the same handle is opened once."""
        ...

    def close(self) -> None:
        """Let go of what is open; safe where nothing is."""
        ...


class Arrivals:
    """One worker's weights, by whatever way."""

    def __init__(self, device: torch.device, rank: int, opener: Opener | None = None) -> None:
        """`rank`: of this worker in its engine."""
        self._device = device
        self._rank = rank
        self._opener: Opener = opener or CudaOpener(device)
        self._group: Collective | None = None

    def join(self, meeting: Mapping[str, Any]) -> None:
        """Be there for broadcasts. Raises `TransferError`."""
        if self._group is not None:
            self._group.leave()
        self._group = Collective.join(Meeting(**meeting), self._rank, self._device)

    def parcel(
        self,
        by: str,
        buckets: Sequence[Sequence[Any]],
        path: str = "",
        handle: Mapping[str, Any] | None = None,
    ) -> Iterator[TensorBucket]:
        """The buckets of one, each as soon as it is here."""
        if by == BY_FILE:
            for bucket in open_buckets(from_payload(path, buckets)):
                yield TensorBucket(bucket.entries, torch.from_numpy(bucket.data))
            return
        for number, rows in enumerate(buckets):
            named = tuple(WeightEntry(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in rows)
            if by == BY_BROADCAST:
                data = self._received(size_of(named), f"bucket {number + 1} of {len(buckets)}")
            elif by == BY_HANDLE:
                data = self._opener.open(handle or {})[: size_of(named)].clone()  # the next bucket overwrites it
            else:
                raise TransferError(f"weights come by {by!r}, which nobody here knows")
            yield TensorBucket(named, data)

    def end(self) -> None:
        """A version is complete: what its sender lent goes back."""
        self._opener.close()

    def _received(self, num_bytes: int, reason: str) -> Tensor:
        if self._group is None:
            raise TransferError("weights are broadcast to an engine that has joined no group")
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._group.broadcast(data, reason)
        return data


class CudaOpener:
    """Memory of another process of this GPU, by torch (CUDA's IPC, or HIP's) and vLLM's count of what is open."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._importer: Any = None

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter

        own = gpu_id(self._device)
        if handle["gpu"] != own:
            raise TransferError(f"weights lie on GPU {handle['gpu']}, and this engine is on {own}")
        if self._importer is None:
            self._importer = PackedBufferImporter()
        return self._importer.rebuild(rebuilt(handle, self._device.index or 0))

    def close(self) -> None:
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
