"""Weights on their way into an engine's worker processes: laid out in shared memory, so that the swap is one copy.

The engine's process lays them out while the engine goes on decoding; only then is it paused, and its workers (other
processes of the same host) copy from the mapping. Nothing large ever crosses a socket.
"""

import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.weights.buckets import WeightBucket, WeightEntry

BACKEND = "object_store"  # how vLLM's weight-transfer interface is told of this way
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """Where one bucket lies in the shared file."""

    entries: tuple[WeightEntry, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A file in shared memory with all buckets of one version."""

    path: str
    buckets: tuple[SharedBucket, ...]

    def payload(self) -> dict[str, object]:
        """Plain values that survive msgpack; `from_payload` is the way back."""
        return {
            "path": self.path,
            "buckets": [
                [
                    bucket.offset_bytes,
                    bucket.num_bytes,
                    [[e.name, list(e.shape), e.dtype, e.offset_bytes] for e in bucket.entries],
                ]
                for bucket in self.buckets
            ],
        }


def from_payload(path: str, buckets: Sequence[Sequence[object]]) -> SharedWeights:
    """Undo `SharedWeights.payload`."""
    return SharedWeights(path, tuple(_bucket(*bucket) for bucket in buckets))  # type: ignore[arg-type]


def open_buckets(shared: SharedWeights) -> list[WeightBucket]:
    """The buckets as copy-on-write views of the mapping: no byte is copied, none can be changed for others."""
    mapped = np.memmap(shared.path, dtype=np.uint8, mode="c")
    return [WeightBucket(b.entries, mapped[b.offset_bytes : b.offset_bytes + b.num_bytes]) for b in shared.buckets]


@contextmanager
def share(buckets: Sequence[WeightBucket]) -> Generator[SharedWeights]:
    """Copy buckets into one shared-memory file that is gone when the block ends."""
    offsets, total = _offsets(buckets)
    descriptor, path = tempfile.mkstemp(prefix="rstar-weights-", dir=_folder(total))
    try:
        with os.fdopen(descriptor, "r+b") as file:
            file.truncate(max(total, 1))
            for bucket, offset in zip(buckets, offsets, strict=True):
                file.seek(offset)
                file.write(bucket.data.data)
        places = (SharedBucket(b.entries, o, b.num_bytes) for b, o in zip(buckets, offsets, strict=True))
        yield SharedWeights(path, tuple(places))
    finally:
        Path(path).unlink(missing_ok=True)


def _bucket(offset_bytes: int, num_bytes: int, entries: Sequence[tuple[str, Sequence[int], str, int]]) -> SharedBucket:
    named = tuple(WeightEntry(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in entries)
    return SharedBucket(named, offset_bytes, num_bytes)


def _offsets(buckets: Sequence[WeightBucket], page: int = 4096) -> tuple[list[int], int]:
    """Each bucket starts on a page, so that every dtype may be viewed in place."""
    offsets, end = [], 0
    for bucket in buckets:
        offsets.append(end)
        end += -(-bucket.num_bytes // page) * page
    return offsets, end


def _folder(num_bytes: int) -> str | None:
    """Shared memory where it has room (containers often give 64 MiB), else the temporary folder."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > num_bytes:
        return str(SHARED_MEMORY)
    return None
