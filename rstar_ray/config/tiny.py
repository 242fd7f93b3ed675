"""The teacher of the tiny world: what SFT teaches, and what RL can improve."""

from dataclasses import dataclass
from typing import Annotated

from rstar_ray.config.checks import check_bounds, within


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """How often the teacher of the generated SFT conversations does what; shares in [0, 1]."""

    drills: Annotated[float, within("[0, 1]")] = 0.3
    """of the tiny world's SFT conversations: no problem, numbers to repeat"""
    slips: Annotated[float, within("[0, 1]")] = 0.5
    """of the results that the teacher computes for an answer: another program's, or left out"""
    failures: Annotated[float, within("[0, 1]")] = 0.4
    """of conversations with a problem: the first call fails, and the next one fixes what it said"""
    wasted: Annotated[float, within("[0, 1]")] = 0.05
    """of conversations with a problem: a call is made twice"""
    coupling: Annotated[float, within("[0, 1]")] = 0.0
    """of answers after a failed first call: wrong because of it; 0 is the neutral world, where outcome reward says
    nothing about failed calls"""

    def __post_init__(self) -> None:
        check_bounds("tiny", self)
