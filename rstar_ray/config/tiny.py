"""The generated SFT conversations of scale tiny, with the teacher's faults, which RL can remove."""

from dataclasses import dataclass
from typing import Annotated

from rstar_ray.config.checks import check_bounds, within


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Shares, in [0, 1], of kinds of generated SFT conversations and of the teacher's faults."""

    drills: Annotated[float, within("[0, 1]")] = 0.3
    """share of the SFT conversations that have no problem, only numbers to repeat"""
    slips: Annotated[float, within("[0, 1]")] = 0.5
    """share of the results computed for an answer that are replaced by another program's result, or omitted"""
    failures: Annotated[float, within("[0, 1]")] = 0.4
    """share of the conversations with a problem whose first call fails; the next call fixes the reported error"""
    wasted: Annotated[float, within("[0, 1]")] = 0.05
    """share of the conversations with a problem in which a call is made twice"""
    coupling: Annotated[float, within("[0, 1]")] = 0.0
    """share of the answers after a failed first call that are wrong because of it; with 0 the outcome reward does not
    depend on failed calls"""

    def __post_init__(self) -> None:
        check_bounds("tiny", self)
