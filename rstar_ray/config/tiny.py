"""The tiny world's teacher: what a policy has seen after SFT, and what reinforcement learning has left to find."""

from dataclasses import dataclass, fields

from rstar_ray.config.checks import require


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """How often the teacher of the generated SFT conversations does what; shares in [0, 1]."""

    drills: float = 0.3
    """of the tiny world's SFT conversations: no problem, numbers to repeat"""
    slips: float = 0.5
    """of the results that the teacher computes for an answer: another program's, or left out"""
    failures: float = 0.4
    """of conversations with a problem: the first call fails, and the next one mends what it said"""
    wasted: float = 0.05
    """of conversations with a problem: a call is made twice"""
    coupling: float = 0.0
    """of answers after a failed first call: wrong because of it; 0 is the neutral world, where outcome reward says
    nothing about failed calls"""

    def __post_init__(self) -> None:
        for item in fields(self):
            share = getattr(self, item.name)
            require(0 <= share <= 1, f"--tiny.{item.name}", f"{share} is no share", "give one from 0 to 1")
