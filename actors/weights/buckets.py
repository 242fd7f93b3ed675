"""Flat byte buckets in which model weights travel from the learner to the engines, instead of one call per tensor.

A parameter is never split over buckets, so a reader can make a view of it without copying.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8
ROW_WORDS = 1024
ROW_BYTES = ROW_WORDS * WORD_BYTES
MODULUS = 2**64
ALIGNMENT_BYTES = 64  # every parameter starts at a multiple of it, so that any dtype can be viewed in place
BFLOAT16 = "bfloat16"  # numpy has no bfloat16: its arrays hold the bit patterns as uint16


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """The place of one parameter in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name: "float32", "bfloat16", ...
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Several parameters in one flat array; immutable."""

    entries: tuple[WeightEntry, ...]
    data: NDArray[np.uint8]  # [bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.data)


BucketPlan = tuple[tuple[WeightEntry, ...], ...]
"""The entries of each bucket of a model, known before any weight is gathered."""


def plan_buckets(weights: Iterable[WeightEntry], max_bytes: int) -> BucketPlan:
    """Buckets of at most `max_bytes`, in the order given; a larger parameter gets a separate bucket."""
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    buckets: list[tuple[WeightEntry, ...]] = []
    bucket: list[WeightEntry] = []
    end = 0
    for one in weights:
        offset = _aligned(end)
        if bucket and offset + one.num_bytes > max_bytes:
            buckets.append(tuple(bucket))
            bucket, offset = [], 0
        bucket.append(replace(one, offset_bytes=offset))
        end = offset + one.num_bytes
    return (*buckets, tuple(bucket)) if bucket else ()


def as_rows(plan: Sequence[Sequence[WeightEntry]]) -> list[list[list[Any]]]:
    """The plan as values that msgpack can encode; `from_rows` reads each bucket back."""
    return [[[one.name, list(one.shape), one.dtype, one.offset_bytes] for one in entries] for entries in plan]


def from_rows(rows: Sequence[Sequence[Any]]) -> tuple[WeightEntry, ...]:
    """The entries of one bucket."""
    return tuple(WeightEntry(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in rows)


def size_of(entries: Sequence[WeightEntry]) -> int:
    """Bytes of a bucket with these entries."""
    return entries[-1].offset_bytes + entries[-1].num_bytes


def checksum(buckets: Iterable[WeightBucket], total: int = 0) -> int:
    """Checksum of names, shapes, types and bytes in entry order, independent of the split into buckets.

    `total`: checksum of the preceding buckets.
    """
    for bucket in buckets:
        for entry in bucket.entries:
            total = chained(entry, sum_of_bytes(_entry_bytes(bucket, entry)), total)
    return total


def sum_of_bytes(data: NDArray[np.uint8]) -> int:
    """A sum of 128 bits over the bytes of one parameter.

    The sum of each row and column of words is multiplied by a different odd number. A flipped bit changes both totals,
    since an odd multiple of a power of two below the modulus is never 0. The two totals are not added, because for the
    highest bits (the signs of weights) such multiples may add up to 0. Words that swap places change a total, unless
    they differ only in their highest bits. Speed on one core: 6.9 GB/s; crc32: 2.6 GB/s.
    """
    whole = len(data) - len(data) % ROW_BYTES
    by_row, by_column = _sums_of_rows(data[:whole].view(np.uint64).reshape(-1, ROW_WORDS), first=0)
    if whole < len(data):
        rest = np.zeros(ROW_BYTES, np.uint8)
        rest[: len(data) - whole] = data[whole:]
        row, column = _sums_of_rows(rest.view(np.uint64).reshape(1, ROW_WORDS), first=whole // ROW_BYTES)
        by_row, by_column = by_row + row, by_column + column
    return joined_sums(by_row, by_column, len(data))


def joined_sums(by_row: int, by_column: int, num_bytes: int) -> int:
    """The sum of 128 bits, from the two totals (of any sign, modulo 2**64) and the number of bytes."""
    return (by_row + num_bytes) % MODULUS * MODULUS + by_column % MODULUS


def chained(entry: WeightEntry, of_bytes: int, total: int) -> int:
    """The checksum `total` extended by one entry; `of_bytes`: `sum_of_bytes` of the entry."""
    return zlib.crc32(f"{entry.name} {entry.shape} {entry.dtype} {of_bytes}\n".encode(), total)


def _entry_bytes(bucket: WeightBucket, entry: WeightEntry) -> NDArray[np.uint8]:
    return bucket.data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.uint16) if name == BFLOAT16 else np.dtype(name)


def _sums_of_rows(words: NDArray[np.uint64], first: int) -> tuple[int, int]:
    by_row = words.sum(1, dtype=np.uint64) * _odd(np.arange(first, first + len(words), dtype=np.uint64))
    by_column = words.sum(0, dtype=np.uint64) * _odd(np.arange(ROW_WORDS, dtype=np.uint64))
    return int(by_row.sum(dtype=np.uint64)), int(by_column.sum(dtype=np.uint64))


def _odd(index: Any) -> Any:
    return 2 * index + 1
