"""Ray's view of one tool's host: an actor of its own, so that a tool that blocks or dies holds up nothing else."""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.health.heartbeat import Alive, Sign
from actors.remote import Remote, in_group
from rstar_ray.config import ToolsConfig
from rstar_ray.errors import RStarError
from rstar_ray.tools.host import AtStake, HostAnswer, HostCall, ToolHost
from rstar_ray.tools.loader import load_environment, load_tools
from rstar_ray.tools.pulse import Pulse
from rstar_ray.tools.spec import ToolSpec

log = logging.getLogger(__name__)

MAX_HOST_RESTARTS = 1_000
"""A host is killed, and started by Ray, each time a call of its blocks it."""
START_S = 120.0
"""For a host that Ray starts, or starts again."""
HELD_UP_S = 1.0
"""A loop that has not turned for so long is held up by a call."""
SAY_HELD_UP_S = 5.0


class ToolHostActor:
    """The address of the hosts of what one entry of `--tools.use` names; every rule lives in `rstar_ray.tools.host`.

    It is probed in a thread of its own: a call may take its time, and hold up the others beside it.
    """

    def __init__(self, name: str, entry: str, folder: str, *, is_environment: bool) -> None:
        sys.path.insert(0, folder)
        self._name = name
        if is_environment:
            self._hosts = {"": ToolHost(environment=load_environment(entry))}
        else:
            self._hosts = {tool.name: ToolHost(tool) for tool in load_tools(entry)}
        self._alive = Alive()
        self._num_answered = 0
        self._pulse: Pulse | None = None  # of the loop that serves calls, once it has
        self._held_up_told = False

    def __repr__(self) -> str:
        return self._name

    async def call(self, tool: str, call: HostCall) -> HostAnswer:
        self._pulse = self._pulse or Pulse(asyncio.get_running_loop())
        answer = await self._hosts[tool].call(call)
        self._num_answered += 1
        return answer

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

    @in_group("probe")
    async def probe(self) -> Sign:
        """For the run's detector."""
        self._log_held_up()
        at_stake = sum((host.at_stake() for host in self._hosts.values()), AtStake())
        return self._alive.sign(progress=self._num_answered, loses=at_stake.line())

    @in_group("probe")
    async def held_up(self) -> bool:
        """Whether a call holds up this process, and with it all of its calls."""
        if self._pulse is None:
            return False
        self._pulse.held_up_s()
        await asyncio.sleep(HELD_UP_S)
        return self._pulse.held_up_s() >= HELD_UP_S

    def _log_held_up(self) -> None:
        """Once each time."""
        seconds = self._pulse.held_up_s() if self._pulse else 0.0
        told, self._held_up_told = self._held_up_told, seconds >= SAY_HELD_UP_S
        if self._held_up_told and not told:
            log.warning("a call has held it up for %.0f s, and all calls beside it: await what takes long", seconds)


def planned_hosts(config: ToolsConfig, specs: Sequence[ToolSpec]) -> dict[str, tuple[str, bool]]:
    """(entry, is it the environment) by name: `config.hosts` for every entry that needs an actor."""
    entries = {spec.entry: False for spec in specs if spec.runs in ("actor", "actor with state")}
    if config.environment:
        entries[config.environment] = True
    return {name: entry for entry in entries.items() for name in host_names(entry[0], config.hosts)}


def start_hosts(
    config: ToolsConfig, specs: Sequence[ToolSpec], folder: str, **options: Any
) -> dict[str, Remote[ToolHostActor]]:
    """The planned hosts by name."""
    actor: Any = ray.remote(concurrency_groups={"probe": 64})(ToolHostActor)  # pyright: ignore[reportCallIssue]
    shared = {"num_cpus": 0, "max_restarts": MAX_HOST_RESTARTS, "max_concurrency": 1_000} | options
    return {
        name: Remote(
            actor.options(name=name, scheduling_strategy="SPREAD", **shared).remote(
                name, entry, folder, is_environment=is_environment
            ),
            name,
        )
        for name, (entry, is_environment) in planned_hosts(config, specs).items()
    }


async def hosts_up(hosts: Mapping[str, Remote[ToolHostActor]]) -> None:
    """Wait until each has loaded what it runs. Raises `RStarError` with what kept one from it."""

    async def up(name: str, host: Remote[ToolHostActor]) -> None:
        try:
            await host.first_answer(lambda h: h.pid(), deadline_s=START_S, reason="its tool")
        except RayActorError as ended:
            last = str(ended).strip().splitlines()[-1]
            raise RStarError(f"{name} did not come up: {last}") from ended

    await asyncio.gather(*(up(name, host) for name, host in hosts.items()))


def host_names(entry: str, hosts: int) -> tuple[str, ...]:
    """Under which names Ray knows the hosts of an entry."""
    return tuple(f"tools/{entry}/{number}" for number in range(hosts))


def entry_of(name: str) -> str:
    """Of the host that Ray knows by this name."""
    return name.removeprefix("tools/").rpartition("/")[0]
