"""What a recipe is: one stage, as the paper sets it and as the tiny world does."""

from dataclasses import dataclass
from typing import Any

from rstar_ray.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One stage: what the paper sets, and what the tiny world sets differently."""

    paper: RunConfig
    tiny: dict[str, Any]

    @property
    def stage(self) -> str:
        return self.paper.stage
