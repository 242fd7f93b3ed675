"""An environment replies to the policy turn by turn and gives the rollout its reward."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from rstar_ray.trajectory import Problem, StopReason, ToolMemory

ENVIRONMENT = "environment"
"""Key of the environment's state in a rollout's tool memories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to one turn. A reply with a reward, any finite number, ends the rollout."""

    text: str = ""
    reward: float | None = None


EndedFn = Callable[[StopReason], Awaitable[tuple[float | None, ToolMemory]]]
"""Notifies the rollout's environment that a limit ended the rollout.

Returns the reward, None where the environment gives none, and the environment's new state. Raises `ToolError` for our
own failures only.
"""


class Environment(Protocol):
    """One object per rollout, created without arguments. It receives every turn that calls no tool.

    The problem's text is the first message. Three methods are optional:

    - `async ended(self, reason: str) -> float | None` is called when turns (`"max_turns"`) or tokens (`"truncated"`)
      run out; its number becomes the reward, None means 0.
    - `snapshot(self) -> str` and `async restore(self, snapshot)`: without them a rollout whose environment is lost
      starts again.
    """

    async def start(self, problem: Problem) -> None: ...
    async def reply(self, said: str) -> Reply: ...
    async def close(self) -> None: ...
