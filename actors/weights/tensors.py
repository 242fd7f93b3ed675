"""Parameters between torch and numpy, which has no bfloat16: its bit patterns travel."""

import torch
from torch import Tensor

from actors.weights.buckets import BFLOAT16, NamedArray


def named_array(name: str, parameter: Tensor) -> NamedArray:
    """On the host; without a copy where it lies there already."""
    on_host = parameter.detach().cpu().contiguous()
    if on_host.dtype == torch.bfloat16:
        return NamedArray(name, on_host.view(torch.uint16).numpy(), BFLOAT16)
    return NamedArray(name, on_host.numpy())


def as_tensor(parameter: NamedArray) -> Tensor:
    """A view of the same memory."""
    tensor = torch.from_numpy(parameter.array)
    return tensor.view(torch.bfloat16) if parameter.dtype_name == BFLOAT16 else tensor
