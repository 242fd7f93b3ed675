"""How long a process may be silent, and a run still, before that is a fault."""

from dataclasses import dataclass
from typing import Annotated

from rstar_ray.config.checks import at_least, check_bounds, require
from rstar_ray.config.tree import MayChange


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """How long a process may be silent, and a run without progress, before that is a fault."""

    probe_every_s: Annotated[MayChange[float], at_least(0.1)] = 2.0
    """between two probes of a process [s]"""
    silent_s: MayChange[float] = 60.0
    """longest an actor may leave a probe unanswered before it is killed and fails over, three times that while
    its engine starts; other calls to it wait two minutes longer [s]
    """
    learner_silent_s: MayChange[float] = 600.0
    """the same of a learner rank, whose checkpoint or compilation may hold it up [s]"""
    engine_step_s: MayChange[float] = 300.0
    """longest an engine with work may go without a decode step before it is killed: a cold compilation [s]"""
    still_s: MayChange[float] = 3_600.0
    """longest the whole run may make no progress before it ends and names the oldest wait [s]"""
    node_away_s: Annotated[MayChange[float], at_least(0)] = 1_200.0
    """after a node was lost, longest the run waits for it to return, or for room elsewhere, before it ends;
    where other replicas serve, the wait for a lost replica has no limit [s]
    """

    def __post_init__(self) -> None:
        check_bounds("detector", self)
        for name in ("silent_s", "learner_silent_s", "engine_step_s", "still_s"):
            seconds = getattr(self, name)
            require(
                seconds >= 3 * self.probe_every_s,
                f"--detector.{name.replace('_', '-')}",
                f"{seconds:g} s are not three probes, which come every {self.probe_every_s:g} s",
                "raise it, or lower --detector.probe-every-s",
            )
