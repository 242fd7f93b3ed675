"""The safety factor: how much KV stays free because lengths are uncertain, from the costs of preemption and idling."""

from collections.abc import Iterable
from statistics import NormalDist, median

from rstar_ray.config import BalancerConfig
from scheduler.cost import LOOKS, USUAL_IDLE_SHARE, PlacementCost, placement_cost, risk_of, running_in
from scheduler.state import Replica

SPARING_STEPS = 3.0  # contexts are spared if a preemption costs more decode steps than this; ...
SPARING_RISK = 0.1  # ... if only the risk is given, they are up to this risk

LEAST_RISK = 1e-12  # with a smaller risk the share rounds to 1, whose quantile is infinite


class Caution:
    """The safety factor `z`: the normal quantile of the risk at each of `LOOKS` moments of a rollout's life."""

    def __init__(self, given: BalancerConfig) -> None:
        """A setting of 0 is derived: the risk from the costs, and the costs from measurements of the engines."""
        self._given = given
        self.cost: PlacementCost | None = None  # None: not measured
        self._settle(given.risk or risk_of(None))

    def _settle(self, risk: float) -> None:
        self.risk = risk
        # Standard deviations that an admission leaves free.
        self.z = NormalDist().inv_cdf((1.0 - max(risk, LEAST_RISK)) ** (1.0 / LOOKS))

    def weigh(self, replicas: Iterable[Replica], context_tokens: float, life_steps: float) -> None:
        """Derive the risk from the engines' measurements, for rollouts of this length and duration."""
        given, replicas = self._given, list(replicas)
        if not replicas:  # all are lost
            return
        found = [
            placement_cost(
                replica.cost,
                kv_tokens=replica.kv_capacity_tokens,
                max_running=replica.max_running,
                context_tokens=context_tokens,
            )
            for replica in replicas
            if replica.cost is not None
        ]
        if found or given.preemption_steps:
            self.cost = PlacementCost(
                preemption_steps=given.preemption_steps or median(one.preemption_steps for one in found),
                idle_share=given.idle_share or (median(one.idle_share for one in found) if found else USUAL_IDLE_SHARE),
                running=median(running_in(r.kv_capacity_tokens, r.max_running, context_tokens) for r in replicas),
                life_steps=life_steps,
            )
        if not given.risk:
            self._settle(risk_of(self.cost))

    @property
    def spares_contexts(self) -> bool:
        """Whether recomputing a context costs more than an empty seat."""
        return self.risk <= SPARING_RISK if self.cost is None else self.cost.preemption_steps > SPARING_STEPS
