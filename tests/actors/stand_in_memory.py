"""Handles of GPU memory without a GPU: files of /dev/shm in their place.

`SharedFile` exports as `CudaExporter` does, and `open_by_file` has torch open it, as vLLM asks torch to.
`WorkerExtension` is for vLLM's worker processes, `of_learner` for Ray's; `StandInEngine` is an engine without vLLM.
"""

import os
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from actors.weights import ipc
from actors.weights.buckets import BucketPlan, WeightBucket, checksum, from_rows, size_of
from actors.weights.transfer import LoadedWeights
from rstar_ray.config import RunConfig

GPU = "GPU-of-this-machine"
FOLDER = Path("/dev/shm")


class SharedFile:
    """`CudaExporter` on a CPU."""

    def __init__(self) -> None:
        self._path = FOLDER / f"rstar-test-{uuid.uuid4().hex}"

    def room(self, num_bytes: int) -> Tensor:
        return torch.from_file(str(self._path), shared=True, size=num_bytes, dtype=torch.uint8)

    def export(self, room: Tensor) -> dict[str, Any]:
        storage = [str(self._path).encode(), len(room), 0, False, b"counter", 0, b"event", False]
        return {"gpu": GPU, "num_bytes": len(room), "storage": storage}

    def ready(self) -> None: ...

    def release(self) -> None:
        self._path.unlink()


def open_by_file() -> None:
    """In the place of torch's `rebuild_cuda_tensor`, in this process."""

    def rebuild(cls: Any, size: Any, stride: Any, offset: int, storage: Any, dtype: Any, *of_storage: Any) -> Tensor:
        _device, path, num_bytes, *_ = of_storage
        assert (cls, offset, storage) == (Tensor, 0, torch.storage.TypedStorage)
        return torch.from_file(path.decode(), shared=True, size=num_bytes, dtype=dtype).view(size)

    patched: Any = torch
    patched.cuda.get_device_properties = lambda *_: SimpleNamespace(uuid=GPU)
    reductions.rebuild_cuda_tensor = rebuild


def of_learner() -> None:
    """For Ray's `worker_process_setup_hook`: ranks export files, and weights go by IPC."""
    patched: Any = RunConfig
    patched.weight_way = property(lambda config: "ipc")
    ipc.CudaExporter = SharedFile  # type: ignore[misc,assignment]


class StandInEngine:
    """A generation actor that only takes weights, and may die at one bucket of one version."""

    def __init__(self, dies_at: tuple[int, int] | None = None) -> None:
        """`dies_at`: version and bucket."""
        self._dies_at = dies_at
        self._version = self._bucket = self._total = 0

    async def begin_weights(self, version: int, plan: BucketPlan) -> None:
        self._version, self._bucket, self._total = version, 0, 0

    async def take_weights(self, parcel: Mapping[str, Any]) -> None:
        if (self._version, self._bucket) == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._bucket += 1
        (rows,), handle = parcel["buckets"], parcel["handle"]
        entries = from_rows(rows)
        data = np.fromfile(handle["storage"][0].decode(), np.uint8, size_of(entries))
        self._total = checksum([WeightBucket(entries, data)], self._total)

    async def end_weights(self) -> LoadedWeights:
        return LoadedWeights(checksum=self._total)


if os.environ.get("RSTAR_TEST_MEMORY") == "files":  # in vLLM's worker
    open_by_file()
    from actors.weights.vllm_worker import WorkerExtension as WorkerExtension
