"""Placement of a run's actors: bundles for Ray's placement group, computed and checked before anything starts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.gpus import WeightWay
from rstar_ray.deadline import within
from rstar_ray.errors import ConfigError, DeadlineExceeded

PLACEMENT_DEADLINE_S = 120.0
EXECUTOR_CPUS = 0.1
"""CPU reserved by a sandbox executor; its programs use the cores that are not reserved."""
TOLERANCE = 1e-6

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One bundle per replica; learner ranks share the replicas' bundles and GPUs, or have separate bundles."""

    bundles: tuple[dict[str, float], ...]  # resources reserved by each bundle
    replica_bundles: tuple[int, ...]  # by replica
    rank_bundles: tuple[int, ...]  # by learner rank
    executors: int  # sandbox actors, outside the bundles
    executor_cpus: float  # per executor

    @property
    def totals(self) -> dict[str, float]:
        """The total reservation of the run, by resource, GPUs first."""
        wanted = _summed(self.bundles)
        wanted["CPU"] = wanted.get("CPU", 0.0) + self.executors * self.executor_cpus
        return {name: round(amount, 4) for name, amount in sorted(wanted.items(), reverse=True)}


def plan_layout(config: RunConfig) -> Layout:
    """Replica i has bundle i; rank j shares bundle j mod replicas, or has a separate bundle after them."""
    engine, learner = config.engine, config.learner
    first, over = (engine.replicas, learner.ranks) if learner.own_gpus else (0, engine.replicas)
    rank_bundles = tuple(first + rank % over for rank in range(learner.ranks))
    replica = {"CPU": engine.cpus_per_replica, "GPU": engine.gpus_per_replica}
    rank = {"CPU": learner.cpus_per_rank, "GPU": learner.gpus_per_rank}
    bundles: list[dict[str, float]] = []
    for bundle in range(max(engine.replicas, *(number + 1 for number in rank_bundles))):
        inside = [replica] * (bundle < engine.replicas) + [rank] * rank_bundles.count(bundle)
        bundles.append({name: round(amount, 4) for name, amount in _summed(inside).items() if amount})
    return Layout(
        bundles=tuple(bundle or {"CPU": 0.01} for bundle in bundles),
        replica_bundles=tuple(range(engine.replicas)),
        rank_bundles=rank_bundles,
        executors=config.sandbox.executors,
        executor_cpus=EXECUTOR_CPUS,
    )


def sending_ranks(layout: Layout, way: WeightWay) -> dict[int, int]:
    """The learner's rank that sends each replica its weights, by replica; empty for the object store."""
    if way == "object_store":
        return {}
    if way == "nccl":
        return dict.fromkeys(range(len(layout.replica_bundles)), 0)
    rank_of = {bundle: rank for rank, bundle in enumerate(layout.rank_bundles)}
    return {replica: rank_of[bundle] for replica, bundle in enumerate(layout.replica_bundles)}


def fitted(config: RunConfig, nodes: Sequence[Resources]) -> RunConfig:
    """The settings scaled down to these nodes, if --on-insufficient-resources allows it.

    Replicas and ranks are reduced in proportion; unchanged if not even one of each fits (see `refuse_small_cluster`).
    """
    if config.on_insufficient_resources == "fail":
        return config
    engine, learner = config.engine, config.learner
    for replicas in range(engine.replicas, 0, -1):
        ranks = max(1, learner.ranks * replicas // engine.replicas)
        values = {"engine.replicas": replicas, "learner.ranks": ranks}
        try:
            smaller = with_values(config, values)  # raises if --learner.hpz-ranks does not divide the ranks
            refuse_small_cluster(plan_layout(smaller), nodes)
        except ConfigError:
            continue
        return smaller
    return config


def larger_plan(config: RunConfig, nodes: Sequence[Resources]) -> str:
    """A message with options by which this run would use more of the cluster's GPUs; empty if there are none."""
    takes, has = plan_layout(config).totals.get("GPU", 0.0), _summed(nodes).get("GPU", 0.0)
    for times in range(int(has / takes + TOLERANCE) if takes else 0, 1, -1):
        replicas, ranks = times * config.engine.replicas, times * config.learner.ranks
        try:
            layout = plan_layout(with_values(config, {"engine.replicas": replicas, "learner.ranks": ranks}))
            refuse_small_cluster(layout, nodes)
        except ConfigError:
            continue
        if _have_room(layout, nodes):
            options = f"--engine.replicas {replicas} --learner.ranks {ranks}"
            more = layout.totals["GPU"]
            return f"this run takes {takes:g} of the cluster's {has:g} GPUs; with {options} it would take {more:g}"
    return ""


def _have_room(layout: Layout, nodes: Sequence[Resources]) -> bool:
    """Whether a greedy placement, largest bundle first, finds room for all bundles; False may be wrong."""
    left = [dict(node) for node in nodes]
    for bundle in sorted(layout.bundles, key=lambda one: (one.get("GPU", 0.0), one.get("CPU", 0.0)), reverse=True):
        node = next((one for one in left if _holds(one, bundle)), None)
        if node is None:
            return False
        for name, amount in bundle.items():
            node[name] -= amount
    return True


def refuse_small_cluster(layout: Layout, nodes: Sequence[Resources]) -> None:
    """Raise `ConfigError` with the numbers if the cluster is too small. `nodes`: resources of each node.

    Three reasons: the total is too small, a bundle is larger than any node, or the nodes cannot hold that many bundles
    although the total is large enough.
    """
    _refuse_too_much(layout, nodes)
    _refuse_large_bundle(layout, nodes)
    _refuse_pieces(layout, nodes)


def _refuse_too_much(layout: Layout, nodes: Sequence[Resources]) -> None:
    has = _summed(nodes)
    for name, wanted in layout.totals.items():
        if wanted > has.get(name, 0.0) + TOLERANCE:
            parts = [f"{count} x {bundle[name]:g}" for count, bundle in _kinds(layout) if name in bundle]
            if name == "CPU":
                parts.append(f"{layout.executors} x {layout.executor_cpus:g} for sandboxes")
            raise ConfigError(
                "--engine.replicas",
                f"{len(layout.bundles)} replicas and {len(layout.rank_bundles)} learner ranks need "
                f"{' + '.join(parts)} = {wanted:g} {name}, the cluster has {has.get(name, 0.0):g}",
                "choose a smaller --scale, lower --engine.replicas, --learner.ranks or their resources, or add nodes",
            )


def _refuse_large_bundle(layout: Layout, nodes: Sequence[Resources]) -> None:
    for _, bundle in _kinds(layout):
        if not any(_holds(node, bundle) for node in nodes):
            largest = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)), default={})
            raise ConfigError(
                "--engine.gpus-per-replica" if _lacks(largest, bundle, "GPU") else "--engine.cpus-per-replica",
                f"a replica and its learner ranks need {_said(bundle)} on one node, the largest has {_said(largest)}",
                "lower what a replica and a rank take, or add larger nodes",
            )


def _refuse_pieces(layout: Layout, nodes: Sequence[Resources]) -> None:
    """Refuse if the nodes could not hold as many bundles of some size as there are of that size or larger."""
    names = {name for bundle in layout.bundles for name in bundle}
    least = {name: min(bundle.get(name, 0.0) for bundle in layout.bundles) for name in names}
    for size in (least, *(bundle for _, bundle in _kinds(layout))):
        needed = sum(not any(_lacks(bundle, size, name) for name in size) for bundle in layout.bundles)
        size = {name: amount for name, amount in size.items() if amount}
        room = sum(
            min((int(node.get(name, 0.0) / amount + TOLERANCE) for name, amount in size.items()), default=needed)
            for node in nodes
        )
        if room < needed:
            raise ConfigError(
                "--engine.replicas",
                f"{needed} bundles of {_said(size)} or more are needed, the nodes have room for {room}, "
                f"each on one node: {', '.join(_said({name: node.get(name, 0.0) for name in size}) for node in nodes)}",
                "lower --engine.replicas and --learner.ranks, or their resources, or add nodes",
            )


def _kinds(layout: Layout) -> list[tuple[int, dict[str, float]]]:
    """The distinct bundles, with their counts."""
    kinds: list[dict[str, float]] = []
    for bundle in layout.bundles:
        if bundle not in kinds:
            kinds.append(bundle)
    return [(layout.bundles.count(bundle), bundle) for bundle in kinds]


def _summed(parts: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _lacks(node: Resources, bundle: Resources, name: str) -> bool:
    return bundle.get(name, 0.0) > node.get(name, 0.0) + TOLERANCE


def _holds(node: Resources, bundle: Resources) -> bool:
    return not any(_lacks(node, bundle, name) for name in bundle)


def _said(resources: Resources) -> str:
    return (
        " and ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("GPU", "CPU") if name in resources) or "none"
    )


def in_bundle(group: Any, bundle: int) -> dict[str, Any]:
    """Ray's actor option for a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}


async def place(layout: Layout, *, deadline_s: float = PLACEMENT_DEADLINE_S) -> Any:
    """Create the placement group and wait for it. Raises `ConfigError` if it is not ready in time."""
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group(list(layout.bundles), strategy="PACK", name="rstar_ray")
    wanted = _said(_summed(layout.bundles))
    try:
        await within(group.ready(), deadline_s, waiter="driver", owner="Ray", reason=f"bundles of {wanted}")
    except DeadlineExceeded as late:
        state = placement_group_table(group)["stats"]["scheduling_state"]
        remove_placement_group(group)
        raise ConfigError(
            "placement", f"no room for {wanted} after {deadline_s:g} s ({state})", hint_for(state)
        ) from late
    return group


def hint_for(scheduling_state: str) -> str:
    """A hint for a placement group that is not ready, by its state."""
    if scheduling_state == "INFEASIBLE":
        return "add nodes, or lower what a replica and a rank take"
    return "wait until other runs have ended, or stop them"
