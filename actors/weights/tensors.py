"""Parameters as torch has them: between torch and numpy, which has no bfloat16, and in buckets on a device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.weights import byte_sums
from actors.weights.buckets import BFLOAT16, NamedArray, WeightBucket, WeightEntry, chained, checksum

WORD = torch.int64
"""Sums of it wrap around at 2**64, as those of byte_sums do."""


@dataclass(frozen=True, slots=True)
class TensorBucket:
    """Some parameters side by side on one device; valid until the buffer behind it is filled again."""

    entries: tuple[WeightEntry, ...]
    data: Tensor  # uint8 [bytes]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Views, by name."""
        for entry in self.entries:
            flat = self.bytes_of(entry).view(getattr(torch, entry.dtype))
            yield entry.name, flat.view(entry.shape)

    def bytes_of(self, entry: WeightEntry) -> Tensor:
        return self.data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]


def filled(entries: Sequence[WeightEntry], data: Tensor, parameters: Iterator[tuple[str, Tensor]]) -> TensorBucket:
    """The next parameters, copied to where the entries say. Raises `ValueError` where they are others."""
    bucket = TensorBucket(tuple(entries), data)
    for expected, place in bucket.weights():
        name, parameter = next(parameters, ("nothing", place))
        if (name, parameter.shape, parameter.dtype) != (expected, place.shape, place.dtype):
            raise ValueError(f"{name} came where {expected} was to lie")
        place.copy_(parameter.detach())
    return bucket


def add_checksum(bucket: TensorBucket, total: int) -> int:
    """As `actors.weights.buckets.checksum`, where the bucket lies."""
    if bucket.data.device.type == "cpu":
        return checksum([WeightBucket(bucket.entries, bucket.data.numpy())], total)
    for entry in bucket.entries:
        total = chained(entry, sum_of_bytes(bucket.bytes_of(entry)), total)
    return total


def sum_of_bytes(data: Tensor) -> int:
    """As `byte_sums.of_array`, on any device; reads 2 x 8 bytes of every 8 and holds a sum for each 8 KiB."""
    words = -(-len(data) // byte_sums.WORD_BYTES)
    rows = -(-words // byte_sums.ROW_WORDS)
    whole = len(data) // byte_sums.ROW_BYTES
    row_sums = torch.zeros(rows, dtype=WORD, device=data.device)
    column_sums = torch.zeros(byte_sums.ROW_WORDS, dtype=WORD, device=data.device)
    parts = [(slice(0, whole), data[: whole * byte_sums.ROW_BYTES])] if whole else []
    if rows > whole:
        rest = torch.zeros(byte_sums.ROW_BYTES, dtype=torch.uint8, device=data.device)
        rest[: len(data) - whole * byte_sums.ROW_BYTES] = data[whole * byte_sums.ROW_BYTES :]
        parts.append((slice(whole, rows), rest))
    for place, part in parts:
        matrix = part.view(WORD).view(-1, byte_sums.ROW_WORDS)
        row_sums[place] = matrix.sum(1)
        column_sums += matrix.sum(0)
    by_row, by_column = (int((sums * _odd(sums)).sum()) for sums in (row_sums, column_sums))
    return byte_sums.joined(by_row, by_column, len(data))


def _odd(sums: Tensor) -> Tensor:
    return 2 * torch.arange(len(sums), dtype=WORD, device=sums.device) + 1


def named_array(name: str, parameter: Tensor) -> NamedArray:
    """On the host; without a copy where it lies there already."""
    on_host = parameter.detach().cpu().contiguous()
    if on_host.dtype == torch.bfloat16:
        return NamedArray(name, on_host.view(torch.uint16).numpy(), BFLOAT16)
    return NamedArray(name, on_host.numpy())
