"""What is more than a tool: it answers what the policy says, turn by turn, and says what the rollout was worth."""

from dataclasses import dataclass
from typing import Protocol

from rstar_ray.trajectory import Problem

ENVIRONMENT = "environment"
"""Under which name a rollout remembers where it stands with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment says to a turn; with a reward, in [0, 1], it was the last."""

    text: str = ""
    reward: float | None = None


class Environment(Protocol):
    """One for each rollout, made without arguments. A turn that calls no tool is said to it.

    The problem's text is the first message. `snapshot(self) -> str` and `async restore(self, snapshot)` are optional:
    without them a rollout whose environment is lost starts again.
    """

    async def start(self, problem: Problem) -> None: ...
    async def reply(self, said: str) -> Reply: ...
    async def close(self) -> None: ...
