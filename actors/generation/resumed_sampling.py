"""In vLLM's workers: a request that goes on with a completion draws from its seed what the rest would have drawn.

vLLM's newer model runner makes its numbers from a request's seed and a token's position, and needs no help. The older
one, which alone runs on CPUs, keeps a generator for each request; on a CPU a token takes one number from it
(`TopKTopPSampler.forward_cpu`), so that it is moved on by as many. How many the older one's kernels take on a GPU is
their affair: there the rest has a seed of its own, so that at least no number is drawn twice.
"""

from functools import wraps
from typing import Any

import torch

from actors.generation.under_way import SAMPLED_BEFORE
from rstar_ray.seeds import derive_seed


def go_on_with_seeds() -> None:
    """Have every request's generator begin behind the tokens that were sampled with it; once in a process."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    made = CachedRequestState.__post_init__

    @wraps(made)
    def moved_on(self: CachedRequestState) -> None:
        made(self)
        asked: dict[str, Any] = (self.sampling_params.extra_args if self.sampling_params else None) or {}
        if self.generator is not None and SAMPLED_BEFORE in asked:
            move_on(self.generator, asked[SAMPLED_BEFORE])

    CachedRequestState.__post_init__ = moved_on


def move_on(generator: torch.Generator, count: int) -> None:
    """To where it is once so many tokens were sampled with it."""
    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (count,), generator=generator)
    else:
        generator.manual_seed(derive_seed(generator.initial_seed(), "after", count))
