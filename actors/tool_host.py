"""The actor that hosts one tool: a separate process, so that a tool that blocks or dies does not stop others."""

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.health.heartbeat import Heartbeat, heartbeat
from actors.remote import in_group, probe_of
from actors.service import Service, ServiceActor
from rstar_ray.config import ToolsConfig, own_environments
from rstar_ray.errors import RStarError, last_line
from rstar_ray.tools.host import AtStake, HostAnswer, HostCall, Pulse, ToolHost
from rstar_ray.tools.loader import load_environment, load_tools
from rstar_ray.tools.spec import ToolSpec

log = logging.getLogger(__name__)

MAX_HOST_RESTARTS = 1_000
"""A host is killed, and restarted by Ray, each time a call blocks it."""
START_S = 120.0
"""Deadline of a host that Ray starts or restarts."""
HELD_UP_S = 1.0
"""An event loop without a turn for so long is blocked by a call."""
REPORT_HELD_UP_S = 5.0


class ToolHostActor(ServiceActor):
    """The actor of the tools of one entry of `--tools.use`; every rule lives in `rstar_ray.tools.host`.

    It is probed in a separate thread, since a call may block the event loop and all other calls.
    """

    def __init__(self, name: str, entry: str, folder: str, *, is_environment: bool) -> None:
        super().__init__(name)
        sys.path.insert(0, folder)
        if is_environment:
            self._hosts = {"": ToolHost(environment=load_environment(entry))}
        else:
            self._hosts = {tool.name: ToolHost(tool) for tool in load_tools(entry)}
        self._num_answered = 0
        self._pulse: Pulse | None = None  # of the loop that serves calls, once it exists
        self._held_up_reported = False

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

    async def close(self) -> None:
        for host in self._hosts.values():
            await host.close()

    @in_group("probe")
    def probe(self) -> Heartbeat:
        """For the watchdog."""
        self._log_held_up()
        at_stake = sum((host.at_stake() for host in self._hosts.values()), AtStake())
        return heartbeat(progress=self._num_answered, lost_with_it=at_stake.line())

    @in_group("probe")
    async def held_up(self) -> bool:
        """Whether a call blocks this process, and with it all other calls."""
        if self._pulse is None:
            return False
        self._pulse.held_up_s()
        await asyncio.sleep(HELD_UP_S)
        return self._pulse.held_up_s() >= HELD_UP_S

    def _log_held_up(self) -> None:
        """Once for each blocking call."""
        seconds = self._pulse.held_up_s() if self._pulse else 0.0
        before, self._held_up_reported = self._held_up_reported, seconds >= REPORT_HELD_UP_S
        if self._held_up_reported and not before:
            log.warning(
                "a call has blocked it and all its other calls for %.0f s; a tool should await slow work", seconds
            )


def planned_hosts(config: ToolsConfig, specs: Sequence[ToolSpec]) -> dict[str, tuple[str, bool]]:
    """(entry, is it an environment) by name: `config.hosts` for every entry that needs an actor."""
    entries = {spec.entry: False for spec in specs if spec.runs in ("actor", "actor with state")}
    entries |= dict.fromkeys(own_environments(config), True)
    return {name: entry for entry in entries.items() for name in host_names(entry[0], config.hosts)}


def start_hosts(
    config: ToolsConfig, specs: Sequence[ToolSpec], folder: str, **options: Any
) -> dict[str, Service[ToolHostActor]]:
    """The planned hosts by name."""
    actor: Any = ray.remote(concurrency_groups={"probe": 64})(ToolHostActor)  # pyright: ignore[reportCallIssue]
    shared = {"num_cpus": 0, "max_restarts": MAX_HOST_RESTARTS, "max_concurrency": 1_000} | options
    return {
        name: Service(
            actor.options(name=name, scheduling_strategy="SPREAD", **shared).remote(
                name, entry, folder, is_environment=is_environment
            ),
            name,
        )
        for name, (entry, is_environment) in planned_hosts(config, specs).items()
    }


async def hosts_up(hosts: Mapping[str, Service[Any]]) -> None:
    """Wait until each host (agents' too) has loaded its code. Raises `RStarError` with the reason for one that
    has not.
    """

    async def up(name: str, host: Service[Any]) -> None:
        try:
            await host.first_answer(probe_of, deadline_s=START_S, reason="its tool")
        except RayActorError as ended:
            raise RStarError(f"{name} did not start: {last_line(ended)}") from ended

    await asyncio.gather(*(up(name, host) for name, host in hosts.items()))


def host_names(entry: str, hosts: int) -> tuple[str, ...]:
    """The actor names of the hosts of an entry."""
    return tuple(f"tools/{entry}/{number}" for number in range(hosts))


def entry_of(name: str) -> str:
    """The entry of the host with this actor name."""
    return name.removeprefix("tools/").rpartition("/")[0]
