"""Learning rates by step, steps counted from 1."""

import math


def warmed_up(step: int, *, peak: float, warmup_steps: int) -> float:
    """Linear warm-up, then constant (arXiv:2508.20722 section 5.1)."""
    return peak * min(1.0, step / warmup_steps) if warmup_steps else peak


def cosine(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up, then half a cosine down to zero at the last step (arXiv:2508.20722 section 4.1)."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
