"""Deadlines after which a silent process, or a run without progress, counts as a fault."""

from dataclasses import dataclass
from typing import Annotated

from rstar_ray.config.checks import at_least, check_bounds, require
from rstar_ray.config.tree import MayChange


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """Deadlines after which a silent process, or a run without progress, counts as a fault."""

    probe_every_s: Annotated[MayChange[float], at_least(0.1)] = 2.0
    """interval between two probes of a process [s]"""
    silent_s: Annotated[MayChange[float], at_least(0)] = 60.0
    """longest time an actor may leave a probe unanswered before it is killed and fails over [s]; three times as long
    while its engine starts. Other calls to it wait two minutes longer
    """
    learner_silent_s: Annotated[MayChange[float], at_least(0)] = 600.0
    """the same for a learner rank, which a checkpoint or a compilation may block [s]"""
    engine_step_s: Annotated[MayChange[float], at_least(0)] = 300.0
    """longest time an engine with work may make no decode step before it is killed [s]; must allow for a cold
    compilation"""
    still_s: Annotated[MayChange[float], at_least(0)] = 3_600.0
    """longest time the whole run may make no progress before it ends and reports the oldest wait [s]"""
    node_away_s: Annotated[MayChange[float], at_least(0)] = 1_200.0
    """longest time the run waits for a lost node to return, or for room elsewhere, before it ends [s]; where other
    replicas serve, the wait for a lost replica has no limit
    """

    def __post_init__(self) -> None:
        check_bounds("detector", self)
        for name in ("silent_s", "learner_silent_s", "engine_step_s", "still_s"):
            seconds = getattr(self, name)
            require(
                seconds >= 3 * self.probe_every_s,
                f"--detector.{name.replace('_', '-')}",
                f"must be at least three probe intervals of {self.probe_every_s:g} s (got {seconds:g})",
                "raise it, or lower --detector.probe-every-s",
            )
