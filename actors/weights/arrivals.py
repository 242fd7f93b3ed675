"""Receives weights from shared memory and broadcasts; runs in vLLM's worker processes.

A bucket's memory must outlive the call: vLLM's layer-wise reload keeps views until a layer is complete.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.weights.buckets import from_rows, size_of
from actors.weights.collective import BY_BROADCAST, Collective, Meeting
from actors.weights.shared_memory import BY_FILE, open_buckets
from actors.weights.tensors import TensorBucket
from rstar_ray.errors import TransferError


class Arrivals:
    """One worker's receiver for shared memory and broadcasts."""

    def __init__(self, device: torch.device, rank: int) -> None:
        """`rank`: this worker's rank in its engine."""
        self._device = device
        self._rank = rank
        self._group: Collective | None = None

    def join(self, meeting: Mapping[str, Any]) -> None:
        """Join the group of broadcasts. Raises `TransferError`."""
        if self._group is not None:
            self._group.leave()
        self._group = Collective.join(Meeting(**meeting), self._rank, self._device)

    def parcel(self, by: str, buckets: Sequence[Sequence[Any]], path: str = "") -> Iterator[TensorBucket]:
        """Yields the buckets of one parcel as they arrive."""
        if by == BY_FILE:
            for bucket in open_buckets(path, [from_rows(rows) for rows in buckets]):
                yield TensorBucket(bucket.entries, torch.from_numpy(bucket.data))
            return
        if by != BY_BROADCAST:
            raise TransferError(f"unknown way of weight transfer {by!r}")
        for number, rows in enumerate(buckets):
            named = from_rows(rows)
            yield TensorBucket(named, self._received(size_of(named), f"bucket {number + 1} of {len(buckets)}"))

    def _received(self, num_bytes: int, reason: str) -> Tensor:
        if self._group is None:
            raise TransferError("a broadcast of weights reached an engine that has not joined a group")
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._group.broadcast(data, reason)
        return data
