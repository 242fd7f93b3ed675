"""The user's own agent, which asks the policy for completions in place of the built-in loop."""

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
    """command of your own agent, which runs once for each rollout in --own-folder, such as `venv/bin/python agent.py`,
    isolated by the sandbox's means; in place of --agent.run"""
    unconfined: Annotated[bool, OWN_COMMAND] = False
    """the command runs with your rights and your network, and so does what the policy has it run"""
    memory_mb: Annotated[MayChange[int], OWN_COMMAND, at_least(64)] = 2048
    """memory of each process of an isolated command [MB]; of all together where control groups are delegated"""
    failed: Annotated[str, OWN_AGENT] = ""
    """module:function that says of a tool message's text whether the call failed; else those marked rstar_failed did"""
    deadline_s: Annotated[MayChange[float], OWN_AGENT, at_least(1)] = 300.0
    """longest the agent may take between an answer and its next request or its end [s]"""
    hosts: Annotated[MayChange[int], OWN_AGENT, at_least(1)] = 1
    """actors that run agents; each agent has a thread there"""

    @property
    def used(self) -> bool:
        """Whether the user's agent takes the place of the built-in loop."""
        return bool(self.run or self.command)

    def __post_init__(self) -> None:
        check_bounds("agent", self)
        for option, name in (("--agent.run", self.run), ("--agent.failed", self.failed)):
            require(not name or is_entry(name), option, f"must be module:function (got {name})", "name both")
        both = bool(self.run and self.command)
        require(not both, "--agent.command", "--agent.run names another agent", "leave out one of them")
