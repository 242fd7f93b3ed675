"""Learning rate over optimizer steps."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """Linear warm-up, then constant (arXiv:2508.20722 section 5.1) or half a cosine down (section 4.1)."""

    learning_rate: float = 1e-6  # peak
    warmup_steps: int = 20
    shape: Literal["constant", "cosine"] = "constant"
    total_steps: int = 0  # where the cosine ends, warm-up included; unused by `constant`
    final_share: float = 0.0  # of the peak, at the cosine's end

    def __post_init__(self) -> None:
        if self.learning_rate < 0 or self.warmup_steps < 0:
            raise ValueError("learning_rate and warmup_steps must not be negative")
        if self.shape == "cosine" and self.total_steps <= self.warmup_steps:
            raise ValueError(f"cosine needs total_steps ({self.total_steps}) above warmup_steps ({self.warmup_steps})")

    def at(self, step: int) -> float:
        """For the update after `step` applied ones; the first of `n` warm-up steps gets 1/n of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        share = self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * share
