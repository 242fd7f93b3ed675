"""Learning rate of each training step, for all of its updates. The first of `n` warm-up steps gets 1/n of the peak."""

import math

from rstar_ray.config import RunConfig, SftConfig


def rl_learning_rate(config: RunConfig, step: int) -> float:
    """Of an RL stage's step, counted from 1: constant after the warm-up (arXiv:2508.20722 section 5.1)."""
    peak = config.optimizer.learning_rate
    return peak * step / config.warmup_steps if step <= config.warmup_steps else peak


def sft_learning_rate(sft: SftConfig, step: int) -> float:
    """Of an SFT step, counted from 1: after the warm-up half a cosine down (arXiv:2508.20722 section 4.1), or constant
    and then linearly down (`wsd`: warm-up, stable, decay; arXiv:2404.06395)."""
    if step <= sft.warmup_steps:
        return sft.learning_rate * step / sft.warmup_steps
    done = min(1.0, (step - 1 - sft.warmup_steps) / (sft.steps - sft.warmup_steps))
    if sft.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * done))
    else:
        height = min(1.0, (1 - done) / (1 - sft.stable_share))
    return sft.learning_rate * (sft.final_share + (1 - sft.final_share) * height)
