"""The user's own agent, which asks the policy for completions in place of the built-in loop."""

from dataclasses import dataclass
from typing import Annotated

from rstar_ray.config.checks import at_least, check_bounds, require
from rstar_ray.config.modes import not_with
from rstar_ray.config.own_code import is_entry
from rstar_ray.config.tree import MayChange

OWN_AGENT = not_with("agent.run", "", warn_only=True)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Training through an agent of the user (docs/agents.md)."""

    run: str = ""
    """module:function of your own agent, `async def solve(problem, endpoint) -> float | None`; empty: the built-in loop
    with --tools.use"""
    failed: Annotated[str, OWN_AGENT] = ""
    """module:function that says of a tool message's text whether the call failed; else those marked rstar_failed did"""
    deadline_s: Annotated[MayChange[float], OWN_AGENT, at_least(1)] = 300.0
    """longest the agent may take between an answer and its next request or its end [s]"""
    hosts: Annotated[MayChange[int], OWN_AGENT, at_least(1)] = 1
    """actors that run agents; each agent has a thread there"""

    def __post_init__(self) -> None:
        check_bounds("agent", self)
        for option, name in (("--agent.run", self.run), ("--agent.failed", self.failed)):
            require(not name or is_entry(name), option, f"must be module:function (got {name})", "name both")
