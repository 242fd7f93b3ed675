"""Parameters in and out of buckets of weights."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.weights.buckets import BFLOAT16, WeightBucket, WeightEntry
from actors.weights.tensors import ServedWeights


@dataclass(frozen=True, slots=True)
class NamedArray:
    """One parameter as numpy. For `bfloat16` the array is uint16 bit patterns."""

    name: str
    array: NDArray[Any]
    dtype: str = ""  # torch's name of the type; empty: as the array's own

    @property
    def dtype_name(self) -> str:
        return self.dtype or self.array.dtype.name


def pack(parameters: Iterable[NamedArray], max_bytes: int) -> list[WeightBucket]:
    """As a learner's rank packs them."""
    named = list(parameters)
    return list(
        ServedWeights(
            lambda: (WeightEntry(one.name, tuple(one.array.shape), one.dtype_name, 0) for one in named),
            lambda group_bytes, everywhere: ((one.name, as_tensor(one)) for one in named),
            max_bytes,
            everywhere=True,
        ).on_host()
    )


def unpack(buckets: Iterable[WeightBucket]) -> Iterator[NamedArray]:
    """The parameters as views into the buckets, in the order they were packed."""
    for bucket in buckets:
        for entry in bucket.entries:
            kind = np.dtype(np.uint16) if entry.dtype == BFLOAT16 else np.dtype(entry.dtype)
            flat = bucket.data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes].view(kind)
            yield NamedArray(entry.name, flat.reshape(entry.shape), entry.dtype)


def as_tensor(parameter: NamedArray) -> torch.Tensor:
    """A view of the same memory."""
    tensor = torch.from_numpy(parameter.array)
    return tensor.view(torch.bfloat16) if parameter.dtype_name == BFLOAT16 else tensor
