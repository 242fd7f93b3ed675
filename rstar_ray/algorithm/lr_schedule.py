"""Learning rate over the steps of a stage."""

import math
from dataclasses import dataclass
from typing import Literal

from rstar_ray.config import RunConfig, SftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """Linear warm-up, then constant (arXiv:2508.20722 section 5.1), half a cosine down (section 4.1), or constant and
    then linearly down (`wsd`, warm-up, stable, decay; arXiv:2404.06395)."""

    learning_rate: float  # peak
    warmup_steps: int  # training steps, as all steps here: those without an update count, and one has all its updates
    shape: Literal["constant", "cosine", "wsd"]
    total_steps: int  # where it ends, warm-up included; unused by `constant`
    final_share: float  # of the peak, at the end
    stable_share: float  # of the steps after warm-up, where `wsd` starts to fall

    def __post_init__(self) -> None:
        if self.learning_rate < 0 or self.warmup_steps < 0:
            raise ValueError("learning_rate and warmup_steps must not be negative")
        if self.shape != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"{self.shape} needs total_steps ({self.total_steps}) above warmup_steps ({self.warmup_steps})"
            )
        if not 0 <= self.stable_share < 1:
            raise ValueError(f"stable_share {self.stable_share} must lie in [0, 1)")

    def at(self, step: int) -> float:
        """For all updates of the step after `step` others; the first of `n` warm-up steps gets 1/n of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        if self.shape == "cosine":
            height = 0.5 * (1 + math.cos(math.pi * done))
        else:
            height = min(1.0, (1 - done) / (1 - self.stable_share))
        share = self.final_share + (1 - self.final_share) * height
        return self.learning_rate * share


def rl_schedule(config: RunConfig) -> LrSchedule:
    """Of an RL stage: constant, after a warm-up where the optimizer state is fresh: Adam's first steps are full-size
    whatever the gradient."""
    return LrSchedule(
        learning_rate=config.optimizer.learning_rate,
        warmup_steps=config.optimizer.warmup_steps if config.fresh_optimizer else 0,
        shape="constant",
        total_steps=config.steps,
        final_share=1.0,
        stable_share=0.0,
    )


def sft_schedule(sft: SftConfig) -> LrSchedule:
    """Of the SFT stage."""
    return LrSchedule(
        learning_rate=sft.learning_rate,
        warmup_steps=round(sft.warmup_share * sft.steps),
        shape=sft.schedule,
        total_steps=sft.steps,
        final_share=sft.final_share,
        stable_share=sft.stable_share,
    )
