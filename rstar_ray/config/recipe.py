"""The record of a recipe: one stage with the paper's settings and those of the tiny world."""

from dataclasses import dataclass
from typing import Any

from rstar_ray.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One stage: the paper's settings, and the tiny world's overrides by dotted name."""

    paper: RunConfig
    tiny: dict[str, Any]

    @property
    def stage(self) -> str:
        return self.paper.stage
