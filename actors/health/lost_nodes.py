"""Logs lost and new nodes, and waits until the bundles of a lost node are placed again.

Ray places the bundles of a lost node again, on a node that has room or that joins. Until then the actors of these
bundles cannot be started.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from actors.cluster.placement import in_bundle
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, RStarError

log = logging.getLogger(__name__)

OPTION = "--detector.node-away-s"
SAY_AFTER_S = 10.0
"""Only longer waits are logged."""


class NodesSeen:
    """Logs changes between two lists of the cluster's nodes."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # addresses of living nodes, by Ray's id

    def see(self, nodes: Sequence[Mapping[str, Any]], at: Mapping[str, str]) -> None:
        """`nodes`: Ray's list of nodes. `at`: node ids of the run's processes, by name, if known."""
        alive: dict[str, str] = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        known, self._known = self._known, alive
        left = f"the cluster has {len(alive)} now"
        for node in known.keys() - alive.keys():
            there = ", ".join(sorted(name for name, where in at.items() if where == node)) or "nothing of the run"
            log.warning(f"node {known[node]} was lost, with {there}; {left}")
        for node in alive.keys() - known.keys() if known else ():
            log.warning(f"node {alive[node]} has joined; {left}")


async def until_placed(
    group: Any,
    named: Mapping[int, str],
    *,
    away_s: float,
    say_after_s: float = SAY_AFTER_S,
) -> None:
    """Wait until each of these bundles is on a node that can run tasks. `named`: names of their actors, by bundle.

    Raises `RStarError` with the names of those without a node after `away_s`.
    """
    stand_in: Any = ray.remote(num_cpus=0, max_retries=-1)(_nothing)
    standing = {
        name: asyncio.ensure_future(_answer(stand_in.options(**in_bundle(group, bundle)).remote()))
        for bundle, name in named.items()
    }

    def missing() -> str:
        return ", ".join(name for name, stands in standing.items() if not stands.done())

    async def wait(seconds: float) -> None:
        every = asyncio.gather(*(asyncio.shield(stands) for stands in standing.values()))
        await within(every, seconds, waiter="driver", owner="Ray", reason=lambda: f"a node for {missing()}")

    try:
        try:
            await wait(min(say_after_s, away_s))
        except DeadlineExceeded:
            log.warning(f"no node for {missing()}: the run waits for a node with room, {away_s:g} s at most ({OPTION})")
            await wait(max(0.0, away_s - say_after_s))
            log.warning("every part has a node again")
    except DeadlineExceeded as late:
        raise no_node(missing(), away_s) from late
    finally:
        for stands in standing.values():
            stands.cancel()


def no_node(name: str, away_s: float) -> RStarError:
    """The error of a run whose parts cannot be placed."""
    return RStarError(
        f"{name} had no node for {away_s:g} s ({OPTION}): their node was lost, and the other nodes have no room; "
        "add a node and repeat the command, or repeat it with --on-insufficient-resources scale-down"
    )


async def _answer(ref: Any) -> None:
    await ref


def _nothing() -> None:
    """A task that shows that its bundle's node can run tasks."""
