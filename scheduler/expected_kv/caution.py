"""The safety factor: how much KV stays free for the uncertainty of lengths, by costs and by reported preemptions."""

from collections.abc import Iterable
from statistics import NormalDist, median

from rstar_ray.config import BalancerConfig
from scheduler.cost import LOOKS, USUAL_IDLE_SHARE, PlacementCost, placement_cost, risk_of, running_in
from scheduler.state import Replica

Z_STEP = 0.1  # how far a report of preemptions moves the safety factor, and `risk` of it back with every end
Z_SPAN = 1.5  # how far it may go above the normal quantile
CLOSING_Z = 2.0  # where all that still wait are expected to fit: what is held back now only prolongs the step
ROOMY_SHARE = 1.1  # of all caches, up to which that is as good as true
SPARING_STEPS = 3.0  # of a preemption, above which contexts are spared, and ...
SPARING_RISK = 0.1  # ... the risk up to which they are where it alone is given
ROOMY_Z = 0.5  # where all rollouts of the step are expected to fit at once, as good as, and are spread evenly


class Caution:
    """The safety factor `z`: the normal quantile of the risk at every look, raised by preemptions.

    Each rollout that ends lets it sink back a little: while more than `risk` of them are preempted it stays up.
    """

    def __init__(self, given: BalancerConfig) -> None:
        """A value of 0 is derived: the risk from the costs, and the costs from measurements of the engines."""
        self._given = given
        self.cost: PlacementCost | None = None  # None: not measured
        self._enough: float | None = None  # deviations, where fewer than the risk's are
        self.raised_z = 0.0  # deviations, by preemptions
        self._settle(given.risk or risk_of(None))

    def _settle(self, risk: float) -> None:
        self.risk = risk
        self._least = NormalDist().inv_cdf((1.0 - risk) ** (1.0 / LOOKS))

    def weigh(
        self, replicas: Iterable[Replica], context_tokens: float, life_steps: float, *, has_history: bool = True
    ) -> None:
        """Derive the risk from the engines' measurements, for rollouts of this length and duration."""
        given, replicas = self._given, list(replicas)
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
            self._settle(risk_of(self.cost, has_history=has_history))

    @property
    def z(self) -> float:
        """The number of standard deviations that an admission leaves free."""
        return self.raised_z + (self._least if self._enough is None else min(self._enough, self._least))

    @property
    def apart(self) -> float:
        """How many count of what siblings add in one place: they are kept apart, however much is left free."""
        return self.raised_z + self._least

    def ease(self, enough: float | None) -> bool:
        """This number of deviations suffices from now on; None: the risk decides. False: nothing changed."""
        eased, self._enough = enough != self._enough, enough
        return eased

    @property
    def spares_contexts(self) -> bool:
        """Whether recomputing a context costs more than an empty seat."""
        return self.risk <= SPARING_RISK if self.cost is None else self.cost.preemption_steps > SPARING_STEPS

    @property
    def roomy(self) -> bool:
        return self._enough == ROOMY_Z

    def preempted(self) -> None:
        self.raised_z = min(self.raised_z + Z_STEP, Z_SPAN)

    def ended(self) -> None:
        self.raised_z = max(0.0, self.raised_z - Z_STEP * self.risk)
