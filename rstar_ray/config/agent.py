"""Settings of a user's agent, which requests completions from the policy in place of the built-in loop."""

from dataclasses import dataclass
from typing import Annotated

from rstar_ray.config.checks import at_least, check_bounds, require
from rstar_ray.config.modes import not_with, where
from rstar_ray.config.own_code import is_entry
from rstar_ray.config.tree import MayChange

OWN_AGENT = where("agent.run", lambda config: config.agent.used, "give --agent.run or --agent.command", warn_only=True)
OWN_COMMAND = not_with("agent.command", "", warn_only=True)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Training through an agent of the user (docs/agents.md)."""

    run: str = ""
    """module:function of your own agent, `async def solve(problem, endpoint) -> float | None`; empty: the built-in loop
    with --tools.use"""
    command: str = ""
    """command of your own agent, such as `venv/bin/python agent.py`; runs once per rollout in --own-folder, isolated
    like a sandbox program; in place of --agent.run"""
    unconfined: Annotated[bool, OWN_COMMAND] = False
    """run the command without isolation: it, and every program that the policy starts through it, has your user's
    rights and network"""
    memory_mb: Annotated[MayChange[int], OWN_COMMAND, at_least(64)] = 2048
    """memory limit per process of an isolated command [MB]; for all its processes together where control groups are
    delegated"""
    failed: Annotated[str, OWN_AGENT] = ""
    """module:function that takes a tool message's text and returns whether the call failed; empty: calls marked
    rstar_failed count as failed"""
    deadline_s: Annotated[MayChange[float], OWN_AGENT, at_least(1)] = 300.0
    """longest time between an answer to the agent and its next request or its end [s]"""
    hosts: Annotated[MayChange[int], OWN_AGENT, at_least(1)] = 1
    """actors that run agents, one thread per agent"""

    @property
    def used(self) -> bool:
        """Whether the user's agent takes the place of the built-in loop."""
        return bool(self.run or self.command)

    def __post_init__(self) -> None:
        check_bounds("agent", self)
        for option, name in (("--agent.run", self.run), ("--agent.failed", self.failed)):
            require(not name or is_entry(name), option, f"must be module:function (got {name})", "give both parts")
        both = bool(self.run and self.command)
        require(not both, "--agent.command", "cannot be combined with --agent.run", "leave out one of them")
