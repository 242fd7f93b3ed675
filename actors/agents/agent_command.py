"""Runs a command as the agent of a rollout: its environment variables, and its reward."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from rstar_ray.agent.endpoint import MODEL, Endpoint
from rstar_ray.config import RunConfig
from rstar_ray.errors import ToolError
from rstar_ray.trajectory import Problem
from sandbox.command import OPTION, Command, CommandEnd, forward, read_command, running
from sandbox.jail.command import PORT

log = logging.getLogger(__name__)

MAX_PROBLEM_BYTES = 120_000
"""Below 128 KiB, the limit of one environment variable."""


class CommandFailed(Exception):
    """The agent's command ended with a status other than 0, or by a signal."""


def command_of(config: RunConfig) -> Command:
    """The command of --agent.command. Raises `ConfigError`."""
    agent = config.agent
    return read_command(agent.command, config.own_folder, memory_mb=agent.memory_mb, confined=not agent.unconfined)


class CommandAgent:
    """Runs one process per rollout; called like a `solve` function."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._left = False  # whether processes left by the command were logged

    async def __call__(self, problem: Problem, endpoint: Endpoint) -> Any:
        """The command's reward, or None. Raises `CommandFailed`, or `SandboxError` if the process was lost."""
        text = json.dumps(asdict(problem), default=str)
        if len(text.encode()) > MAX_PROBLEM_BYTES:
            raise ToolError(f"{OPTION}: a problem of {len(text)} characters does not fit into its environment")
        port = urlsplit(endpoint.base_url).port or 0
        address = f"http://127.0.0.1:{PORT if self._command.confined else port}"
        async with running(self._command, environment(address, endpoint, text)) as command:
            if command.listener is None:
                end = await command.end()
            else:
                server = await forward(command.listener, port)
                try:
                    end = await command.end()
                finally:
                    server.close()  # does not wait: the connections end with the command
        if end.left and not self._left:
            self._left = True
            log.warning(f"agent: its command left {end.left} processes behind; they are ended with every rollout")
        return reward_of(end)


def environment(address: str, endpoint: Endpoint, problem: str) -> Mapping[str, str]:
    """Environment variables of the command: `problem` as JSON, and address and key of the policy."""
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "RSTAR_MODEL": MODEL,
        "RSTAR_PROBLEM": problem,
        "RSTAR_ROLLOUT": endpoint.rollout_id,
        "RSTAR_SEED": str(endpoint.seed),
    }


def reward_of(end: CommandEnd) -> Any:
    """The reward in the last output line that is a JSON object with the key "reward"; None if there is none.

    >>> reward_of(CommandEnd(exit_status=0, left=0, stdout='thinking\\n{"reward": 0.5}\\ndone\\n', stderr=""))
    0.5
    """
    if end.exit_status:
        how = f"exit status {end.exit_status}" if end.exit_status > 0 else f"ended by signal {-end.exit_status}"
        raise CommandFailed(f"{how}: {end.stderr.strip()[-300:] or 'nothing on stderr'}")
    for line in reversed(end.stdout.splitlines()):
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and "reward" in said:
            return said["reward"]
    return None
