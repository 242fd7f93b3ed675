"""Which placement rule is fastest for rollouts of given lengths: one step simulated with each, on a few replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rstar_ray.config import BalancerConfig
from scheduler.balancer import PLACEMENT
from scheduler.cost import EngineCost
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import Simulator, SimulatorSettings
from scheduler.traces.trace import TraceRollout

DEFAULT = "expected_kv"
COMPARED = (DEFAULT, "least_requests", "least_sessions")
"""The default and the two simple rules that were fastest in benchmarks."""
REPLICAS = 4  # at most; a step's rollouts are shared out evenly, so these stand for all
MOST_ROLLOUTS = 1_024  # of a simulated step; more take minutes
NEAR = 0.97  # rules whose times differ by less count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTimes:
    """Seconds of a step."""

    first_s: float  # the rule has seen no rollout
    later_s: float  # it has seen a step with such lengths


def rule_times(
    rollouts: Sequence[TraceRollout],
    *,
    per_replica: float,
    replicas: int,
    shape: EngineShape,
    cost: EngineCost,
    max_response_tokens: int,
    max_turns: int,
    placement: BalancerConfig = PLACEMENT,
) -> dict[str, RuleTimes]:
    """Times of every rule in `COMPARED`, on at most `REPLICAS` replicas with `per_replica` rollouts each, or
    `MOST_ROLLOUTS` together.

    Whole groups of the given rollouts are taken evenly, or several times if there are too few. Raises `NeverFits`
    where a replica cannot hold a rollout.
    """
    replicas = min(replicas, REPLICAS)
    settings = SimulatorSettings(
        replicas=replicas,
        shape=shape,
        cost=cost,
        max_response_tokens=max_response_tokens,
        max_turns=max_turns,
        placement=placement,
    )
    step = of_size(rollouts, min(MOST_ROLLOUTS, max(1, round(per_replica * replicas))))
    times = dict[str, RuleTimes]()
    for rule in COMPARED:
        first, later = (Simulator(step, rule, settings, history=seen).run().makespan_s for seen in ((), step))
        times[rule] = RuleTimes(first_s=first, later_s=later)
    return times


def of_size(rollouts: Sequence[TraceRollout], number: int) -> list[TraceRollout]:
    """About this many rollouts, in whole groups and in their order."""
    groups = dict[str, list[TraceRollout]]()
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    names = list(groups)
    wanted = max(1, round(number * len(names) / len(rollouts)))
    chosen = list[TraceRollout]()
    for copy in range(-(-wanted // len(names))):
        some = min(wanted - copy * len(names), len(names))
        for at in range(some):
            name = names[at * len(names) // some]
            chosen += [replace(rollout, group=f"{copy}:{name}") for rollout in groups[name]]
    return chosen


def recommended_rule(times: Mapping[str, RuleTimes]) -> str:
    """The fastest in later steps; of those that are nearly as fast, the fastest in a first step. The default wins if
    it is nearly as fast as that one."""
    shortest = min(one.later_s for one in times.values())
    near = {rule: one for rule, one in times.items() if one.later_s * NEAR <= shortest}
    first = min(one.first_s for one in near.values())
    if DEFAULT in near and near[DEFAULT].first_s * NEAR <= first:
        return DEFAULT
    return min(near, key=lambda rule: near[rule].first_s)
