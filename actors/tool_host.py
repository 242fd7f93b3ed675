"""Ray's view of one tool's host: an actor of its own, so that a tool that blocks or dies holds up nothing else."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import ray

from rstar_ray.config import ToolsConfig
from rstar_ray.tools.host import HostAnswer, HostCall, ToolHost
from rstar_ray.tools.load import load_environment, load_tools
from rstar_ray.tools.spec import ToolSpec

MAX_HOST_RESTARTS = 1_000
"""A host is killed, and started by Ray, each time a call of its blocks it."""


class ToolHostActor:
    """The address of the hosts of what one entry of `--tools.use` names; every rule lives in `rstar_ray.tools.host`."""

    def __init__(self, name: str, entry: str, folder: str, *, is_environment: bool) -> None:
        sys.path.insert(0, folder)
        self._name = name
        if is_environment:
            self._hosts = {"": ToolHost(environment=load_environment(entry))}
        else:
            self._hosts = {tool.name: ToolHost(tool) for tool in load_tools(entry)}

    def __repr__(self) -> str:
        return self._name

    async def call(self, tool: str, call: HostCall) -> HostAnswer:
        return await self._hosts[tool].call(call)

    async def take_over(self, rollout_id: str, holder: str) -> None:
        for host in self._hosts.values():
            host.take_over(rollout_id, holder)

    async def end(self, rollout_id: str, holder: str) -> None:
        for host in self._hosts.values():
            await host.end(rollout_id, holder)

    async def num_states(self) -> int:
        return sum(host.num_states for host in self._hosts.values())

    async def pid(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        for host in self._hosts.values():
            await host.close()


def planned_hosts(config: ToolsConfig, specs: Sequence[ToolSpec]) -> dict[str, tuple[str, bool]]:
    """(entry, is it the environment) by name: `config.hosts` for every entry that needs an actor."""
    entries = {spec.entry: False for spec in specs if spec.runs in ("actor", "actor with state")}
    if config.environment:
        entries[config.environment] = True
    return {name: entry for entry in entries.items() for name in host_names(entry[0], config.hosts)}


def start_hosts(config: ToolsConfig, specs: Sequence[ToolSpec], folder: str, **options: Any) -> dict[str, Any]:
    """Handles of the planned hosts by name."""
    actor = ray.remote(ToolHostActor)
    shared = {"num_cpus": 0, "max_restarts": MAX_HOST_RESTARTS, "max_concurrency": 1_000} | options
    return {
        name: actor.options(name=name, scheduling_strategy="SPREAD", **shared).remote(
            name, entry, folder, is_environment=is_environment
        )
        for name, (entry, is_environment) in planned_hosts(config, specs).items()
    }


def host_names(entry: str, hosts: int) -> tuple[str, ...]:
    """Under which names Ray knows the hosts of an entry."""
    return tuple(f"tools/{entry}/{number}" for number in range(hosts))
