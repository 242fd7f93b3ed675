"""What lies in buckets of weights, parameter by parameter; the product reads them where they lie, as torch has them."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from actors.weights.buckets import BFLOAT16, NamedArray, WeightBucket


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
