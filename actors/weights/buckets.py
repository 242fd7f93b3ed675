"""Model weights on their way from the learner to the engines: flat byte buckets, never a call per tensor.

A parameter lies whole in one bucket, so a reader can make a view of it without copying.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.weights import byte_sums

ALIGNMENT_BYTES = 64  # every parameter starts at a multiple, so that any dtype may be viewed in place
BFLOAT16 = "bfloat16"  # numpy has no such type: its arrays hold the bit patterns as uint16


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


def pack(parameters: Iterable[NamedArray], max_bytes: int) -> Iterator[WeightBucket]:
    """Copy parameters, in the order given, into buckets of at most `max_bytes`.

    A parameter larger than `max_bytes` gets a bucket of its own. Lazy: at most one bucket's
    parameters are held at a time.
    """
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    waiting: list[tuple[WeightEntry, NDArray[Any]]] = []
    end = 0
    for parameter in parameters:
        array = parameter.array
        offset = _aligned(end)
        if waiting and offset + array.nbytes > max_bytes:
            yield _bucket(waiting, end)
            waiting, offset = [], 0
        waiting.append((WeightEntry(parameter.name, tuple(array.shape), parameter.dtype_name, offset), array))
        end = offset + array.nbytes
    if waiting:
        yield _bucket(waiting, end)


def unpack(buckets: Iterable[WeightBucket]) -> Iterator[NamedArray]:
    """The parameters as views into the buckets, in the order they were packed."""
    for bucket in buckets:
        for entry in bucket.entries:
            flat = _entry_bytes(bucket, entry).view(_numpy_dtype(entry.dtype))
            yield NamedArray(entry.name, flat.reshape(entry.shape), entry.dtype)


def checksum(buckets: Iterable[WeightBucket], total: int = 0) -> int:
    """One figure of names, shapes, types and bytes in entry order; where buckets end does not matter.

    `total` goes on from the checksum of the buckets before.
    """
    for bucket in buckets:
        for entry in bucket.entries:
            of_bytes = byte_sums.of_array(_entry_bytes(bucket, entry))
            total = zlib.crc32(f"{entry.name} {entry.shape} {entry.dtype} {of_bytes}\n".encode(), total)
    return total


def _bucket(waiting: Sequence[tuple[WeightEntry, NDArray[Any]]], num_bytes: int) -> WeightBucket:
    data = np.zeros(num_bytes, np.uint8)
    for entry, array in waiting:
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data[entry.offset_bytes : entry.offset_bytes + len(source)] = source
    return WeightBucket(tuple(entry for entry, _ in waiting), data)


def _entry_bytes(bucket: WeightBucket, entry: WeightEntry) -> NDArray[np.uint8]:
    return bucket.data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.uint16) if name == BFLOAT16 else np.dtype(name)
