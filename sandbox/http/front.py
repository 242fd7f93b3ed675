"""One address for the sandbox servers of several hosts: `python -m sandbox front`.

To clients it is a server as any (`sandbox/http/server.py`), with the same doors. Workers are named on its command line,
or join by their address and token:

    POST /workers/join   {"address": "http://node-7:8088", "token": "..."}   with the join token
    POST /workers/leave  {"address": "http://node-7:8088"}                   tells how many calls it still has
"""

import ipaddress
import re
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rstar_ray.errors import ConfigError
from sandbox.errors import SandboxFull
from sandbox.http import door
from sandbox.http.bodies import Bodies
from sandbox.http.connections import room_for_connections
from sandbox.http.fleet import Fleet, FleetConfig
from sandbox.http.roster import Patience, State
from sandbox.http.server import Facts, ServerConfig, listen
from sandbox.isolation import IsolationLevel

_HOST = re.compile(r"[a-z0-9._:-]+")
MAX_JOIN_BYTES = 4096
ADDRESS_CHARS, TOKEN_CHARS = 200, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Whom a front answers, and whom it gives programs to."""

    server: ServerConfig
    queue_size: int
    level: IsolationLevel  # a worker below it gets nothing ...
    allow_landlock: bool = False  # ... unless this accepts `landlock`
    workers: tuple[str, ...] = ()  # addresses that are there from the start ...
    worker_token: str = ""  # ... and their token
    join_token: str = ""  # of workers that join by themselves; empty: none may
    allow_workers: tuple[str, ...] = ()  # host names, addresses and networks where those may be, beside the loopback
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        for address in self.workers:
            worker_address(address)
        if not self.workers and not self.join_token:
            raise ConfigError(
                "worker", "nobody would run the programs", "name one with --worker, or let them join with --join-token"
            )
        if self.join_token and self.join_token == self.server.token:
            raise ConfigError(
                "join_token", "it is the clients' token", "use another: who joins sees the programs of all clients"
            )
        for pattern in self.allow_workers:
            if "/" in pattern:
                _network(pattern)

    def levels(self) -> frozenset[IsolationLevel]:
        """Of the workers that may run programs."""
        order = list(IsolationLevel)
        levels = order[: order.index(self.level) + 1]
        return frozenset([*levels, IsolationLevel.LANDLOCK] if self.allow_landlock else levels)


def worker_address(text: object) -> str:
    """A worker's address in its one form: http or https, a host, a port. Raises ConfigError."""
    try:
        if not isinstance(text, str) or len(text) > ADDRESS_CHARS:
            raise ValueError("it is no text, or too long")
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        if parts.scheme not in ("http", "https") or not host or not port or parts.username is not None:
            raise ValueError("it has another form")
        if parts.path not in ("", "/") or parts.query or parts.fragment or not _HOST.fullmatch(host):
            raise ValueError("it has more than a host and a port")
    except ValueError as error:
        shown = repr(text)[:ADDRESS_CHARS]
        raise ConfigError("worker", f"{shown} is no address: {error}", "give http://HOST:PORT") from error
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def may_join(address: str, allowed: Collection[str]) -> bool:
    """True where a worker may be at `address`: on the loopback, or at a host of the list."""
    host = urlsplit(address).hostname or ""
    if door.is_loopback(host):
        return True
    try:
        there = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".") in {each.lower().rstrip(".") for each in allowed}
    return any(there in _network(each) for each in allowed if _is_network(each))


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError("allow_worker", f"{text} is no network: {error}", "give one as 10.0.0.0/24") from error


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


class Front:
    """What a front tells, and the routes of its workers."""

    def __init__(self, fleet: Fleet, config: FrontConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._bodies = Bodies()
        self._registry = CollectorRegistry()
        self._registry.register(_FleetCollector(fleet))
        for address in config.workers:
            fleet.roster.join(worker_address(address), config.worker_token)

    def facts(self) -> Facts:
        """For the server."""
        routes = (("/workers/join", self._join), ("/workers/leave", self._leave)) if self._config.join_token else ()
        return Facts(
            status=self._status,
            metrics=lambda: generate_latest(self._registry),
            routes=routes,
            routes_token=self._config.join_token,
        )

    def _status(self) -> dict[str, Any]:
        workers = list(self._fleet.roster)
        serving = [worker for worker in workers if worker.state is State.SERVING]
        told = [
            {"address": each.address, "state": str(each.state), "why": each.why}
            | {"num_workers": each.slots, "under_way": len(each.calls), "answered": each.answered}
            for each in workers
        ]
        return {
            "queue": self._fleet.waiting,
            "num_workers": sum(worker.slots for worker in serving),
            "level": str(self._config.level),
            "missing": self._fleet.roster.missing(),
            "workers": told,
        }

    async def _join(self, request: web.Request) -> web.Response:
        try:
            address, given = await self._read(request)
            if not may_join(address, self._config.allow_workers):
                raise ValueError(f"{address} is not among the hosts of this front's workers: --allow-worker")
            token = given.get("token", "")
            if not isinstance(token, str) or len(token) > TOKEN_CHARS or not (token.isascii() and token.isprintable()):
                raise ValueError("token: what is given is none")
            self._fleet.roster.join(address, token)
        except (ValueError, ConfigError) as error:
            return web.json_response({"detail": str(error)}, status=422)
        except SandboxFull as error:
            return web.json_response({"detail": str(error)}, status=503)
        return web.json_response({"address": address})

    async def _leave(self, request: web.Request) -> web.Response:
        try:
            address, _ = await self._read(request)
        except (ValueError, ConfigError) as error:
            return web.json_response({"detail": str(error)}, status=422)
        return web.json_response({"under_way": self._fleet.roster.leave(address)})

    async def _read(self, request: web.Request) -> tuple[str, dict[str, Any]]:
        """The address and all that a worker says. Raises ValueError or ConfigError."""
        data = await self._bodies.read(request, MAX_JOIN_BYTES)
        given = cast(dict[str, Any], data) if isinstance(data, dict) else {}
        if set(given) - {"address", "token"}:
            raise ValueError("a worker says its address and its token, and no more")
        return worker_address(given.get("address")), given


class _FleetCollector(Collector):
    """A front's figures for Prometheus, read when scraped; those that a pool has too have its names."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        calls = CounterMetricFamily("sandbox_calls", "programs that ended, by outcome", labels=["outcome"])
        for outcome, count in fleet.finished.items():
            calls.add_metric([outcome], count)
        yield calls
        for name, meaning in (
            ("accepted", "calls taken in"),
            ("refused", "calls refused for want of room"),
            ("failed", "calls that ended in an error of ours"),
            ("retried", "calls whose worker was lost"),
        ):
            yield CounterMetricFamily(f"sandbox_{name}", meaning, value=fleet.counts[name])
        yield GaugeMetricFamily("sandbox_queue", "calls waiting", value=fleet.waiting)
        yield GaugeMetricFamily("sandbox_running", "calls at workers", value=fleet.under_way)
        serving = GaugeMetricFamily("sandbox_worker_serving", "1 for a worker that serves", labels=["worker"])
        for worker in fleet.roster:
            serving.add_metric([worker.address], worker.state is State.SERVING)
        yield serving


@asynccontextmanager
async def front(config: FrontConfig) -> AsyncGenerator[tuple[Fleet, int]]:
    """Answer inside the block, which gets the calls and the port. Raises ConfigError for an address that is taken."""
    most = room_for_connections()
    under_way = max(most // 4, 8)  # a descriptor each; the rest is for clients
    fleet_config = FleetConfig(
        levels=config.levels(),
        queue_size=config.queue_size,
        most_under_way=under_way,
        longest_s=config.server.ceilings.wall_s,
        patience=config.patience,
    )
    async with Fleet(fleet_config) as fleet:
        facts = Front(fleet, config).facts()
        runner, port = await listen(fleet, config.server, facts, max(most - under_way, 8))
        try:
            yield fleet, port
        finally:
            await fleet.close()  # first: the server waits for those whom it has not answered
            await runner.cleanup()
