"""Tries the placement of actors on fake nodes: Ray places stand-ins, which are checked and shown in a table.

python recipes/plan.py --scale mi300x-64 --dry-run
"""

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from actors.cluster.bundles import Seat, executor_nodes, in_order, nodes_in_order, on_node, seats_of, stand_ins
from actors.cluster.placement import Layout, fitted, place, plan_layout, refuse_small_cluster
from rstar_ray.config import RunConfig
from rstar_ray.config.scales import Machines

OBJECT_STORE_BYTES = 80 * 2**20
"""Object store of each fake node; the least that Ray accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """The placement of a run; nodes by number, 0 is the head."""

    machines: Machines
    layout: Layout  # in order
    seats: tuple[Seat, ...]  # by bundle; `node` is its number here
    sandboxes: tuple[int, ...]  # node of each sandbox executor
    balancer: int
    driver: int
    seconds: float

    def at(self, bundle: int) -> tuple[int, tuple[int, ...]]:
        seat = self.seats[bundle]
        return int(seat.node), seat.gpus


def dry_run(config: RunConfig, machines: Machines) -> Seating:
    """Raises `ConfigError` if the cluster is too small and --on-insufficient-resources is fail."""
    started = time.monotonic()
    node = {"CPU": float(machines.cpus), "GPU": float(machines.gpus)}
    config = fitted(config, [node] * machines.nodes)
    layout = plan_layout(config)
    refuse_small_cluster(layout, [node] * machines.nodes)
    with fake_cluster(machines):
        return asyncio.run(_take_seats(layout, machines, started))


@contextmanager
def fake_cluster(machines: Machines) -> Generator[None]:
    """A Ray cluster with all nodes on this machine; GPUs are only counted."""
    import ray
    from ray.cluster_utils import Cluster

    each = {"num_cpus": machines.cpus, "num_gpus": machines.gpus, "object_store_memory": OBJECT_STORE_BYTES}
    few = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}  # default: one per core
    head = {**each, "include_dashboard": False, "_system_config": {**few, "worker_niceness": 0}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(machines.nodes - 1):
            cluster.add_node(wait=False, **each)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


async def _take_seats(layout: Layout, machines: Machines, started: float) -> Seating:
    import ray

    group = await place(layout)
    nodes = nodes_in_order(ray.nodes())
    seats = await seats_of(stand_ins(group, layout))
    dealt = executor_nodes(nodes, layout.executors)
    share = {"num_cpus": layout.executor_cpus}
    sandboxes = await _nodes_of([share | on_node(node, or_elsewhere=True) for node in dealt])
    balancer = await _nodes_of([on_node(nodes[0], or_elsewhere=False)])
    return Seating(
        machines=machines,
        layout=in_order(layout, seats, nodes),
        seats=tuple(replace(seat, node=str(nodes.index(seat.node))) for seat in seats),
        sandboxes=tuple(nodes.index(node) for node in sandboxes),
        balancer=nodes.index(balancer[0]),
        driver=nodes.index(ray.get_runtime_context().get_node_id()),
        seconds=time.monotonic() - started,
    )


async def _nodes_of(options: Sequence[dict[str, Any]]) -> list[str]:
    """Nodes on which Ray places actors with these options; starts one process for each."""
    import ray

    from actors.cluster.bundles import StandIn

    actor: Any = ray.remote(StandIn)
    standing = [actor.options(**{"num_cpus": 0, **each}).remote() for each in options]
    return [seat.node for seat in await seats_of(standing)]


def problems(seating: Seating) -> list[str]:
    """Errors in the placement; empty if there are none."""
    layout, found = seating.layout, list[str]()
    engines = [seating.at(bundle) for bundle in layout.replica_bundles]
    ranks = [seating.at(bundle) for bundle in layout.rank_bundles]
    for who, places in (("replicas", engines), ("ranks", ranks)):
        taken = [(node, gpu) for node, gpus in places for gpu in gpus]
        if len(taken) != len(set(taken)):
            found.append(f"two {who} on one GPU")
        if places != sorted(places):
            found.append(f"{who} are not in order of node and GPU")
    parallel = [gpus for _, gpus in engines if len(gpus) > 1]
    shared = {(node, gpu) for node, gpus in engines if len(gpus) > 1 for gpu in gpus}
    if parallel and shared & {(node, gpu) for node, gpus in ranks for gpu in gpus}:
        found.append("an engine split over GPUs shares one with a rank")
    if len(seating.sandboxes) >= seating.machines.nodes > len(set(seating.sandboxes)):
        found.append("a node is without a sandbox")
    if (seating.balancer, seating.driver) != (0, 0):
        found.append(f"balancer on node {seating.balancer} and driver on node {seating.driver}, not on the head")
    return found


def table(seating: Seating) -> str:
    """One row per node: the contents of each GPU, and the processes on its cores."""
    holds = holders(seating)
    width = max(len(text) for text in ("GPU 0", *holds.values())) + 2
    head = f"{'node':<9}" + "".join(f"{f'GPU {gpu}':<{width}}" for gpu in range(seating.machines.gpus)) + "cores"
    lines = [head.rstrip()]
    for node in range(seating.machines.nodes):
        gpus = "".join(f"{holds.get((node, gpu), '-'):<{width}}" for gpu in range(seating.machines.gpus))
        lines.append(f"{'head' if not node else f'node {node}':<9}{gpus}{' '.join(on_cores(seating, node))}".rstrip())
    return "\n".join([*lines, "", "e: engine (replica), r: learner rank, s: sandbox executor"])


def holders(seating: Seating) -> dict[tuple[int, int], str]:
    """By node and GPU: `e12 r12`."""
    held: dict[tuple[int, int], list[str]] = {}
    for letter, bundles in (("e", seating.layout.replica_bundles), ("r", seating.layout.rank_bundles)):
        for number, bundle in enumerate(bundles):
            node, gpus = seating.at(bundle)
            for gpu in gpus:
                held.setdefault((node, gpu), []).append(f"{letter}{number}")
    return {place: " ".join(who) for place, who in held.items()}


def on_cores(seating: Seating, node: int) -> list[str]:
    """The processes on a node's cores: driver, balancer, sandboxes, and engines and ranks without GPUs."""
    found = ["driver"] * (seating.driver == node) + ["balancer"] * (seating.balancer == node)
    found += [f"s{number}" for number, where in enumerate(seating.sandboxes) if where == node]
    for letter, bundles in (("e", seating.layout.replica_bundles), ("r", seating.layout.rank_bundles)):
        places = [seating.at(bundle) for bundle in bundles]
        found += [f"{letter}{number}" for number, (where, gpus) in enumerate(places) if where == node and not gpus]
    return found


def as_text(seating: Seating, wanted: RunConfig) -> str:
    """The table, a note if the plan was scaled down, and the errors."""
    layout = seating.layout
    lines = [
        f"{seating.machines.nodes} fake nodes of {seating.machines.gpus} GPUs and {seating.machines.cpus} cores, placed"
        f" by Ray in {seating.seconds:.0f} s: {len(layout.replica_bundles)} replicas, {len(layout.rank_bundles)} ranks,"
        f" {layout.executors} sandboxes",
    ]
    if (len(layout.replica_bundles), len(layout.rank_bundles)) != (wanted.engine.replicas, wanted.learner.ranks):
        lines.append(f"a smaller plan: {wanted.engine.replicas} replicas and {wanted.learner.ranks} ranks do not fit")
    wrong = problems(seating)
    good = "one replica and one rank to a GPU at most, in order; sandboxes, balancer and driver on the expected nodes"
    return "\n".join([*lines, "", table(seating), "", *([f"WRONG: {each}" for each in wrong] or [good])])
