"""Parameters as torch tensors in buckets, on a device or in host memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.weights.buckets import (
    ROW_BYTES,
    ROW_WORDS,
    WORD_BYTES,
    BucketPlan,
    WeightBucket,
    WeightEntry,
    chained,
    joined_sums,
    plan_buckets,
    size_of,
    sum_of_bytes,
)

WORD = torch.int64
"""Sums wrap around at 2**64, as in `buckets.sum_of_bytes`."""


@dataclass(frozen=True, slots=True)
class TensorBucket:
    """Several parameters in one buffer on one device; valid until the buffer is filled again."""

    entries: tuple[WeightEntry, ...]
    data: Tensor  # uint8 [bytes]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each parameter."""
        for entry in self.entries:
            flat = self.data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
            yield entry.name, flat.view(getattr(torch, entry.dtype)).view(entry.shape)


class ServedWeights:
    """The newest weights of one learner rank, in buckets; gathers about one bucket at a time.

    Every method that yields buckets is a collective of all ranks, so callers must read it to its end.
    """

    def __init__(
        self,
        entries: Callable[[], Iterator[WeightEntry]],
        gather: Callable[..., Iterator[tuple[str, Tensor]]],
        bucket_bytes: int,
        *,
        everywhere: bool,
    ) -> None:
        """`gather(group_bytes, everywhere=)` yields the parameters in the order of `entries`, on every rank or only on
        the first. `everywhere`: `on_device` yields buckets on every rank."""
        self._entries = entries
        self._gather = gather
        self._bucket_bytes = bucket_bytes
        self._everywhere = everywhere

    @property
    def plan(self) -> BucketPlan:
        return plan_buckets(self._entries(), self._bucket_bytes)

    def on_host(self) -> Iterator[WeightBucket]:
        """Yields buckets in host memory, on the first rank only; the other ranks call `take_part`."""
        parameters = self._gather(self._bucket_bytes, everywhere=False)
        for entries in self.plan:
            data = torch.zeros(size_of(entries), dtype=torch.uint8)  # padding between parameters is 0
            yield WeightBucket(entries, filled(entries, data, parameters).data.numpy())
        _exhaust(parameters)

    def on_device(self, data: Tensor) -> Iterator[TensorBucket]:
        """Yields each bucket in the first bytes of `data` (uint8, size of the largest bucket); valid until the next."""
        parameters = self._gather(self._bucket_bytes, everywhere=self._everywhere)
        for entries in self.plan:
            yield filled(entries, data[: size_of(entries)], parameters)
        _exhaust(parameters)

    def take_part(self) -> None:
        """Take part in the gathers and discard the weights."""
        for _ in self._gather(self._bucket_bytes, everywhere=False):
            pass


def _exhaust(parameters: Iterator[tuple[str, Tensor]]) -> None:
    """Run the last collective of the gather. Raises `ValueError` for a parameter that is not in the plan."""
    for name, _ in parameters:
        raise ValueError(f"{name} is not in the plan")


def filled(entries: Sequence[WeightEntry], data: Tensor, parameters: Iterator[tuple[str, Tensor]]) -> TensorBucket:
    """Copy the next parameters to their entries' places. Raises `ValueError` if name, shape or dtype differ."""
    bucket = TensorBucket(tuple(entries), data)
    for expected, place in bucket.weights():
        name, parameter = next(parameters, ("nothing", place))
        if (name, parameter.shape, parameter.dtype) != (expected, place.shape, place.dtype):
            raise ValueError(f"expected parameter {expected}, got {name}")
        place.copy_(parameter.detach())
    return bucket


def add_checksum(weights: Iterable[tuple[str, Tensor]], total: int) -> int:
    """As `actors.weights.buckets.checksum`, computed on the weights' device, on its current stream."""
    for name, weight in weights:
        data = weight.contiguous().view(-1).view(torch.uint8)
        on_host = data.device.type == "cpu"
        of_bytes = sum_of_bytes(data.numpy()) if on_host else sum_of_tensor(data)
        entry = WeightEntry(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."), 0)
        total = chained(entry, of_bytes, total)
    return total


def sum_of_tensor(data: Tensor) -> int:
    """As `buckets.sum_of_bytes`, on any device; reads every byte twice and keeps one sum per 8 KiB."""
    words = -(-len(data) // WORD_BYTES)
    rows = -(-words // ROW_WORDS)
    whole = len(data) // ROW_BYTES
    row_sums = torch.zeros(rows, dtype=WORD, device=data.device)
    column_sums = torch.zeros(ROW_WORDS, dtype=WORD, device=data.device)
    parts = [(slice(0, whole), data[: whole * ROW_BYTES])] if whole else []
    if rows > whole:
        rest = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=data.device)
        rest[: len(data) - whole * ROW_BYTES] = data[whole * ROW_BYTES :]
        parts.append((slice(whole, rows), rest))
    for place, part in parts:
        matrix = part.view(WORD).view(-1, ROW_WORDS)
        row_sums[place] = matrix.sum(1)
        column_sums += matrix.sum(0)
    by_row, by_column = (int((sums * _odd(sums)).sum()) for sums in (row_sums, column_sums))
    return joined_sums(by_row, by_column, len(data))


def _odd(sums: Tensor) -> Tensor:
    return 2 * torch.arange(len(sums), dtype=WORD, device=sums.device) + 1
