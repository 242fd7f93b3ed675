"""Assigns replicas and ranks to bundles in order of node and GPU, because Ray numbers bundles in arbitrary order.

Neighbouring ranks of a collective are then neighbours in the hardware. Sandboxes are spread over all nodes, the head
included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.cluster.placement import Layout, in_bundle
from rstar_ray.deadline import within

SEATED_DEADLINE_S = 120.0
HEAD = "node:__internal_head__"
"""Resource by which Ray marks the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The node and GPUs of one bundle."""

    bundle: int
    node: str  # Ray's id
    gpus: tuple[int, ...]  # of that node; none on a CPU


class StandIn:
    """Temporary actor in a bundle that reports the bundle's node and GPUs."""

    def where(self) -> tuple[str, tuple[int, ...]]:
        return ray.get_runtime_context().get_node_id(), tuple(sorted(int(gpu) for gpu in ray.get_gpu_ids()))


def stand_ins(group: Any, layout: Layout) -> list[Any]:
    """One stand-in per bundle, with its GPUs; the caller kills them."""
    actor: Any = ray.remote(StandIn)
    gpus = [bundle.get("GPU", 0) for bundle in layout.bundles]
    return [  # an actor has one GPU at most, or whole ones
        actor.options(num_cpus=0, num_gpus=amount if amount <= 1 else int(amount), **in_bundle(group, number)).remote()
        for number, amount in enumerate(gpus)
    ]


async def seats_of(standing: Sequence[Any]) -> list[Seat]:
    """The places of these stand-ins. Raises `DeadlineExceeded`."""
    return [
        Seat(bundle=bundle, node=node, gpus=gpus)
        for bundle, actor in enumerate(standing)
        for node, gpus in [
            await within(
                actor.where.remote(),
                SEATED_DEADLINE_S,
                waiter="driver",
                owner=f"bundle {bundle}",
                reason="its place",
            )
        ]
    ]


async def seated(group: Any, layout: Layout) -> Layout:
    """The layout with replicas and ranks in order of node and GPU; unchanged for one bundle or without GPUs."""
    if len(layout.bundles) == 1 or not any("GPU" in bundle for bundle in layout.bundles):
        return layout
    standing = stand_ins(group, layout)
    try:
        return in_order(layout, await seats_of(standing), nodes_in_order(ray.nodes()))
    finally:
        for actor in standing:
            ray.kill(actor)


def nodes_in_order(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of the living nodes: the head first, the others by address."""
    alive = [node for node in nodes if node["Alive"]]
    alive.sort(key=lambda node: (HEAD not in node["Resources"], _numbers(node["NodeManagerAddress"]), node["NodeID"]))
    return [node["NodeID"] for node in alive]


def _numbers(address: str) -> list[tuple[int, str]]:
    """Sort key that puts 10.0.0.9 before 10.0.0.10."""
    return [(int(part) if part.isdigit() else -1, part) for part in address.split(".")]


def in_order(layout: Layout, seats: Sequence[Seat], nodes: Sequence[str]) -> Layout:
    """The layout with bundles of equal reservations exchanged so that they follow nodes and GPUs."""
    position = {node: number for number, node in enumerate(nodes)}
    by_seat = sorted(seats, key=lambda seat: (position[seat.node], seat.gpus, seat.bundle))
    exchanged: dict[int, int] = {}
    for kind in {tuple(sorted(bundle.items())) for bundle in layout.bundles}:
        alike = [number for number, bundle in enumerate(layout.bundles) if tuple(sorted(bundle.items())) == kind]
        in_kind = [seat.bundle for seat in by_seat if seat.bundle in set(alike)]
        exchanged |= dict(zip(alike, in_kind, strict=True))
    return replace(
        layout,
        replica_bundles=tuple(exchanged[bundle] for bundle in layout.replica_bundles),
        rank_bundles=tuple(exchanged[bundle] for bundle in layout.rank_bundles),
    )


def executor_nodes(nodes: Sequence[str], executors: int) -> list[str]:
    """The node of each executor, round-robin."""
    return [nodes[number % len(nodes)] for number in range(executors)]


def on_node(node: str, *, or_elsewhere: bool) -> dict[str, Any]:
    """Ray's actor option for a node; `or_elsewhere`: allow another node if this one is lost.

    With `or_elsewhere` Ray may also choose another node for an actor without reservations while this node lives.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=or_elsewhere)}
