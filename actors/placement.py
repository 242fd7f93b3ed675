"""Where the actors of a run go: bundles for Ray's placement group, computed before anything starts."""

from dataclasses import dataclass
from typing import Any

from rstar_ray.config import RunConfig
from rstar_ray.deadline import within
from rstar_ray.errors import ConfigError, DeadlineExceeded

PLACEMENT_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One bundle per replica; learner ranks share the bundles, and so the GPUs, of the replicas."""

    bundles: tuple[dict[str, float], ...]  # what each bundle reserves
    replica_bundles: tuple[int, ...]  # by replica
    rank_bundles: tuple[int, ...]  # by learner rank
    executor_cpus: float  # of each sandbox executor, outside the bundles

    @property
    def totals(self) -> dict[str, float]:
        names = {name for bundle in self.bundles for name in bundle}
        return {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in sorted(names)}


def plan_layout(config: RunConfig) -> Layout:
    """Replica i has bundle i; rank j shares bundle j mod replicas."""
    engine, learner = config.engine, config.learner
    rank_bundles = tuple(rank % engine.replicas for rank in range(learner.ranks))
    bundles: list[dict[str, float]] = []
    for replica in range(engine.replicas):
        ranks = rank_bundles.count(replica)
        wanted = {
            "CPU": engine.cpus_per_replica + ranks * learner.cpus_per_rank,
            "GPU": engine.gpus_per_replica + ranks * learner.gpus_per_rank,
        }
        bundles.append({name: round(amount, 4) for name, amount in wanted.items() if amount})
    return Layout(
        bundles=tuple(bundle or {"CPU": 0.01} for bundle in bundles),
        replica_bundles=tuple(range(engine.replicas)),
        rank_bundles=rank_bundles,
        executor_cpus=0.1,
    )


def refuse_misfit(layout: Layout, offered: dict[str, float]) -> None:
    """Raise `ConfigError` with the numbers where the cluster is too small for the layout."""
    for name, wanted in layout.totals.items():
        if wanted > offered.get(name, 0.0) + 1e-6:
            raise ConfigError(
                "placement",
                f"{len(layout.bundles)} bundles need {wanted:g} {name}, the cluster has {offered.get(name, 0.0):g}",
                "choose a smaller --scale, fewer --engine.replicas or --learner.ranks, or add nodes",
            )


async def place(layout: Layout) -> Any:
    """Create the placement group and wait for it. Raises `ConfigError` where it cannot be had."""
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group(list(layout.bundles), strategy="PACK", name="rstar_ray")
    try:
        await within(
            group.ready(), PLACEMENT_DEADLINE_S, waiter="driver", owner="Ray", reason=f"bundles {layout.totals}"
        )
    except DeadlineExceeded as late:
        state = placement_group_table(group)["stats"]["scheduling_state"]
        remove_placement_group(group)
        mend = "add nodes" if state == "INFEASIBLE" else "wait until other runs have ended, or stop them"
        raise ConfigError("placement", f"no room for {layout.totals} ({state})", mend) from late
    return group
