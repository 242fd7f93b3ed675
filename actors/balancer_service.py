"""The balancer actor: an address, a clock and polls for `scheduler.balancer.Balancer`, which decides.

Workers and driver call it in batches. A worker registers, then keeps one `next_orders` call open and sends one `report`
per tick. The driver submits rollouts, whose payloads (opaque here) come out again with the grant. Orders are delivered
again until acknowledged, so a cancelled poll loses nothing; a worker skips the rollouts it already runs.

When the actor dies, Ray starts an empty one with a new `incarnation`. Workers receive `UnknownReplica` and register
again with the rollouts that they run; the driver loads the state it had learned and submits every unfinished rollout
again (known rollouts are left alone). For `settle_s` after such a start nothing is admitted, so that no rollout that
still runs is granted twice.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

import ray

from actors.cluster.ray_metrics import ray_meter
from actors.health.heartbeat import Heartbeat, heartbeat
from actors.remote import AckedQueue, Batch
from actors.service import Service, ServiceActor
from rstar_ray.config import BalancerConfig
from rstar_ray.errors import DeadlineExceeded
from rstar_ray.telemetry.meter import NO_METER, Meter
from scheduler.balancer import PLACEMENT, Balancer
from scheduler.expected_kv.learned import Learned
from scheduler.records import Grant, Order, Registration, RolloutLoad, UnknownReplica

P = ParamSpec("P")
R = TypeVar("R")

DECISIONS_AT_ONCE = 1024  # then the event loop serves other calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """State that the balancer learns and keeps over steps."""

    incarnation: str  # of the balancer's process
    learned: Learned | None  # None: its rule learns nothing


def _served(
    method: Callable[Concatenate[Balancer, P], R], *, wakes: bool = True
) -> "Callable[Concatenate[BalancerService, P], Coroutine[Any, Any, R]]":
    """This method of the balancer as a remote method of the service; `wakes`: decisions may follow from it."""

    @wraps(method)
    async def serve(service: "BalancerService", *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(service.balancer, *args, **kwargs)
        finally:  # a report of a replica in quarantine is processed too
            if wakes:
                service.wake()

    return serve


class BalancerService:
    """Without Ray: one event loop, no threads."""

    def __init__(
        self,
        *,
        placement: BalancerConfig = PLACEMENT,
        settle_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        meter: Meter = NO_METER,
    ) -> None:
        self._balancer = Balancer(placement.rule, placement)
        self._meter = meter
        self._clock = clock
        self._incarnation = uuid4().hex[:12]
        self._queues: dict[str, AckedQueue[Order]] = {}  # orders, by replica
        self._registered = asyncio.Event()
        self._admit_from = clock() + settle_s
        if settle_s:
            self._registered.set()  # with an earlier incarnation; the only replica may have died since, for minutes
        self._tick: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Balancer({self._balancer.rule.name})"

    @property
    def balancer(self) -> Balancer:
        """At the present time."""
        self._balancer.now_s = self._clock()
        return self._balancer

    # -- what the balancer does without waiting -------------------------------------------------------------------
    cancel = _served(Balancer.cancel)
    report = _served(Balancer.report)
    return_rollouts = _served(Balancer.return_rollouts)
    missing = _served(Balancer.missing, wakes=False)
    set_policy_version = _served(Balancer.set_policy_version, wakes=False)
    snapshot = _served(Balancer.snapshot, wakes=False)
    step_figures = _served(Balancer.step_figures, wakes=False)

    # -- the driver's side ----------------------------------------------------------------------------------------
    async def submit(self, items: Sequence[tuple[RolloutLoad, Any]], wait_s: float = 60.0) -> None:
        """Queue these rollouts with their payloads; known ones are left alone.

        Waits for a first replica to register, with any incarnation of the actor, so that a rollout that can never fit
        is refused here: raises `NeverFits` with the numbers, `DeadlineExceeded` without a replica.
        """
        if not self._registered.is_set():  # otherwise at once, so that a `cancel` right behind it finds them
            try:
                await asyncio.wait_for(self._registered.wait(), wait_s)
            except TimeoutError:
                raise DeadlineExceeded("submit", "balancer", "a first replica to register", wait_s) from None
        self.balancer.submit([load for load, _ in items], [payload for _, payload in items])
        self.wake()

    async def held_by_lost(self, replica_id: str, unfinished: Sequence[str]) -> list[str]:
        """The rollouts of a replica that is gone, which gets no more.

        Where this incarnation does not know it: those of `unfinished` that no other replica holds, once the replicas
        that live have had the time to register.
        """
        held = self.balancer.residents(replica_id)
        if held is not None:
            self.balancer.set_serving(replica_id, False)
            return held
        await asyncio.sleep(max(0.0, self._admit_from - self._clock()))
        return self.balancer.waiting(unfinished)

    async def replica_lost(self, replica_id: str) -> list[str]:
        """The replica is dead: its rollouts wait again, from their last reported turn. Returns their ids."""
        lost = self.balancer.replica_lost(replica_id)
        self._close_queue(replica_id)
        self.wake()
        return lost

    async def learned(self) -> Known:
        return Known(incarnation=self._incarnation, learned=self.balancer.learned())

    async def load_learned(self, learned: Learned) -> Known:
        """Load a state of an earlier incarnation, or of a checkpoint."""
        self.balancer.load_learned(learned)
        return await self.learned()

    def export(self) -> None:
        """Set the metrics of this moment."""
        now, meter = self.balancer.snapshot(), self._meter
        meter.set("rstar_balancer_waiting", now.waiting)
        meter.set("rstar_balancer_in_flight", now.in_flight)
        if capacity := sum(replica.kv_capacity_tokens for replica in now.replicas):
            used = sum(replica.kv_used_tokens for replica in now.replicas)
            reserved = sum(replica.kv_reserved_tokens for replica in now.replicas)
            meter.set("rstar_balancer_kv_used_ratio", used / capacity)
            meter.set("rstar_balancer_kv_reserved_ratio", reserved / capacity)
        meter.set("rstar_balancer_replicas", len(now.replicas))
        quarantined = [replica for replica in now.replicas if replica.quarantine is not None]
        meter.set("rstar_balancer_replicas_quarantined", len(quarantined))
        meter.reached("rstar_balancer_moves_total", now.moves)
        meter.reached("rstar_balancer_preemptions_total", now.preemptions)
        meter.reached("rstar_balancer_recomputed_tokens_total", now.recomputed_tokens)

    # -- the workers' side ----------------------------------------------------------------------------------------
    async def register(self, replica: Registration) -> list[str]:
        """The replica serves. Returns the rollouts that it must stop, because another replica holds them."""
        stop = self.balancer.register(replica)
        self._close_queue(replica.replica_id)
        self._queues[replica.replica_id] = AckedQueue()
        self._registered.set()
        self.wake()
        return stop

    async def next_orders(self, replica_id: str, acknowledged: int, wait_s: float) -> Batch[Order]:
        """The orders after number `acknowledged`; waits up to `wait_s` for the first, and is empty where none came.

        Raises `UnknownReplica` when it must register (again).
        """
        if replica_id not in self._queues:
            raise UnknownReplica(f"replica {replica_id!r} is not registered; register it with what is resident")
        return await self._queues[replica_id].take(acknowledged, wait_s)

    def _close_queue(self, replica_id: str) -> None:
        """End the replica's open poll: the replica must register."""
        if (queue := self._queues.pop(replica_id, None)) is not None:
            removed = UnknownReplica(f"replica {replica_id!r} was removed while it waited; register it again")
            queue.close(removed, discard=True)

    # -- decisions ------------------------------------------------------------------------------------------------
    def wake(self) -> None:
        """Send the decided orders, and decide once in this turn of the loop for all calls that arrived together."""
        self._send_orders()
        if self._tick is None:
            delay = max(0.0, self._admit_from - self._clock())
            self._tick = asyncio.get_running_loop().call_later(delay, self._decide)

    def _send_orders(self) -> None:
        for replica_id, order in self._balancer.orders:
            if isinstance(order, Grant) and order.placement is not None:
                self._meter.observe("rstar_balancer_wait_seconds", order.placement.waited_s)
            self._queues[replica_id].put(order)
        self._balancer.orders.clear()

    def _decide(self) -> None:
        self._tick = None
        balancer = self.balancer
        complete = balancer.now_s >= self._admit_from and balancer.issue_orders(DECISIONS_AT_ONCE)
        self._send_orders()
        if not complete:  # other calls first; or the timer fired a little early
            self.wake()


class BalancerActor(BalancerService, ServiceActor):
    """`BalancerService` in its own process, started by `start_balancer`."""

    def __init__(self, config: BalancerConfig = PLACEMENT, *, settle_s: float = 5.0, run: str = "") -> None:
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        ServiceActor.__init__(self, "balancer")
        settle_s = settle_s if restarted else 0.0
        BalancerService.__init__(self, placement=config, settle_s=settle_s, meter=ray_meter(run))

    def probe(self) -> Heartbeat:
        with self._meter.guarded():
            self.export()
        return heartbeat()


def start_balancer(
    config: BalancerConfig, *, run: str = "", settle_s: float = 5.0, **options: Any
) -> Service[BalancerService]:
    """The actor under the name "balancer"; `options` are Ray's."""
    shared = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": 4096}
    actor: Any = ray.remote(BalancerActor).options(**{"name": "balancer"} | shared | options)
    return Service(actor.remote(config, run=run, settle_s=settle_s), "balancer")
