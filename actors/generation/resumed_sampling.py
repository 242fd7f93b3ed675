"""In vLLM's workers: a request that goes on with a completion draws from its seed what the rest would have drawn.

On a CPU vLLM's sampler draws one number for each token from the request's generator
(`TopKTopPSampler.forward_cpu`), so that the generator is moved on by as many. On a GPU how much a token draws is the
kernel's affair: there the rest has a seed of its own, which follows from the request's and the count; the same numbers
are not drawn twice. Importing this module does it.
"""

from functools import wraps
from typing import Any

import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from actors.generation.under_way import SAMPLED_BEFORE
from rstar_ray.seeds import derive_seed


def move_on(generator: torch.Generator, count: int) -> None:
    """To where it is once so many tokens were sampled with it."""
    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (count,), generator=generator)
    else:
        generator.manual_seed(derive_seed(generator.initial_seed(), "after", count))


made = CachedRequestState.__post_init__


@wraps(made)
def _made(self: CachedRequestState) -> None:
    made(self)
    asked: dict[str, Any] = (self.sampling_params.extra_args if self.sampling_params else None) or {}
    if self.generator is not None and SAMPLED_BEFORE in asked:
        move_on(self.generator, asked[SAMPLED_BEFORE])


CachedRequestState.__post_init__ = _made
