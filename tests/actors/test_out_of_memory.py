"""Which failures of a rank are an end of memory, after which the gang starts again instead of ending the run."""

import pytest
import torch

from actors.learner.gang import ran_out_of_memory


@pytest.mark.parametrize(
    "cause",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_memory_that_is_not_there_may_be_there_the_next_time(cause: Exception):
    assert ran_out_of_memory(cause)


@pytest.mark.parametrize(
    "cause", [RuntimeError("shapes do not match"), OSError(27, "File too large"), ValueError("out of memory of steps")]
)
def test_what_would_happen_again_ends_the_run(cause: Exception):
    assert not ran_out_of_memory(cause)


def test_torch_says_so_itself_where_there_is_none():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**62, dtype=torch.uint8)
    assert ran_out_of_memory(raised.value)
