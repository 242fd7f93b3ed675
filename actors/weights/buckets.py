"""Model weights on their way from the learner to the engines: flat byte buckets, never a call per tensor.

A parameter lies whole in one bucket, so a reader can make a view of it without copying.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.weights import byte_sums

ALIGNMENT_BYTES = 64  # every parameter starts at a multiple, so that any dtype may be viewed in place
BFLOAT16 = "bfloat16"  # numpy has no such type: its arrays hold the bit patterns as uint16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamedArray:
    """One parameter as numpy. For `bfloat16` the array is uint16 bit patterns."""

    name: str  # the Hugging Face parameter name
    array: NDArray[Any]
    dtype: str = ""  # torch's name of the type; empty: as the array's own

    @property
    def dtype_name(self) -> str:
        return self.dtype or self.array.dtype.name


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """Where one parameter lies inside its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name: "float32", "bfloat16", ...
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some parameters side by side in one flat array; immutable once made."""

    entries: tuple[WeightEntry, ...]
    data: NDArray[np.uint8]  # [bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.data)


BucketPlan = tuple[tuple[WeightEntry, ...], ...]
"""Of a whole model, known before anything is gathered: the entries of each bucket."""


def pack(parameters: Iterable[NamedArray], max_bytes: int) -> Iterator[WeightBucket]:
    """Copy parameters, in the order given, into buckets of at most `max_bytes`.

    A parameter larger than `max_bytes` gets a bucket of its own. Lazy: at most one bucket's
    parameters are held at a time.
    """
    for placed in _placed(((one, one.array.nbytes) for one in parameters), max_bytes):
        entries = [WeightEntry(one.name, tuple(one.array.shape), one.dtype_name, offset) for one, offset in placed]
        yield _bucket(entries, [one.array for one, _ in placed])


def plan_buckets(weights: Iterable[WeightEntry], max_bytes: int) -> BucketPlan:
    """Where `pack` would put weights of these names, shapes and types."""
    placed = _placed(((one, one.num_bytes) for one in weights), max_bytes)
    return tuple(tuple(replace(one, offset_bytes=offset) for one, offset in bucket) for bucket in placed)


def size_of(entries: Sequence[WeightEntry]) -> int:
    """Bytes of a bucket of these."""
    return entries[-1].offset_bytes + entries[-1].num_bytes


def checksum(buckets: Iterable[WeightBucket], total: int = 0) -> int:
    """One figure of names, shapes, types and bytes in entry order; where buckets end does not matter.

    `total` goes on from the checksum of the buckets before.
    """
    for bucket in buckets:
        for entry in bucket.entries:
            total = chained(entry, byte_sums.of_array(_entry_bytes(bucket, entry)), total)
    return total


def chained(entry: WeightEntry, of_bytes: int, total: int) -> int:
    """A checksum that goes on with one more entry, of whose bytes `of_bytes` is the sum."""
    return zlib.crc32(f"{entry.name} {entry.shape} {entry.dtype} {of_bytes}\n".encode(), total)


def _placed(parameters: Iterable[tuple[T, int]], max_bytes: int) -> Iterator[list[tuple[T, int]]]:
    """Things and their bytes, bucket by bucket, each with its offset."""
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    waiting: list[tuple[T, int]] = []
    end = 0
    for one, num_bytes in parameters:
        offset = _aligned(end)
        if waiting and offset + num_bytes > max_bytes:
            yield waiting
            waiting, offset = [], 0
        waiting.append((one, offset))
        end = offset + num_bytes
    if waiting:
        yield waiting


def _bucket(entries: Sequence[WeightEntry], arrays: Sequence[NDArray[Any]]) -> WeightBucket:
    data = np.zeros(size_of(entries), np.uint8)
    for entry, array in zip(entries, arrays, strict=True):
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data[entry.offset_bytes : entry.offset_bytes + len(source)] = source
    return WeightBucket(tuple(entries), data)


def _entry_bytes(bucket: WeightBucket, entry: WeightEntry) -> NDArray[np.uint8]:
    return bucket.data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.uint16) if name == BFLOAT16 else np.dtype(name)
