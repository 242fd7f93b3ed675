"""The balancer actor: workers poll it for orders, and events wake the polls; the placement rules live in scheduler/.

Workers and driver call it in batches. A worker registers, then keeps one `next_orders` call open and sends one `report`
per tick. The driver submits rollouts, whose payloads (opaque here) come out again with the grant. Orders are delivered
again until acknowledged, so a cancelled poll loses nothing; a worker skips the rollouts it already runs.

When the actor dies, Ray starts an empty one with a new `incarnation`. Workers receive `UnknownReplica` and register
again with the rollouts that they run; the driver loads the state it had learned and submits every unfinished rollout
again (known rollouts are left alone). For `settle_s` after such a start nothing is admitted, so that no rollout that
still runs is granted twice.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import ray

from actors.cluster.ray_metrics import ray_meter
from actors.health.heartbeat import Alive, Sign
from actors.remote import AckedQueue, Batch, Remote
from rstar_ray.config import BalancerConfig
from rstar_ray.errors import DeadlineExceeded
from rstar_ray.run_dir.metrics import PlacementFigures
from rstar_ray.telemetry.meter import NO_METER, Meter
from rstar_ray.trajectory import Placement
from scheduler.balancer import PLACEMENT, Balancer
from scheduler.learned import Learned
from scheduler.records import (
    Admission,
    BalancerSnapshot,
    Decisions,
    Finished,
    Move,
    Registration,
    ReplicaLoad,
    RolloutLoad,
    TurnReport,
    UnknownReplica,
)
from scheduler.tally import Tally
from scheduler.waits import Waits

log = logging.getLogger(__name__)

DECISIONS_AT_ONCE = 1024  # then the event loop serves other calls


SAMPLE_EVERY_S = 0.25  # of waiting, in flight and KV, for the figures of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Run this rollout: from its payload, at the lengths of its load."""

    load: RolloutLoad
    payload: Any
    waited_s: float = 0.0  # since it was submitted
    placement: Placement | None = None  # why it runs there


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop this rollout; its result is not wanted."""

    rollout_id: str


Order = Grant | Move | Cancel
"""What a replica must do. A `Move` hands the rollout back at its next turn boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the balancer has learned that outlives a step."""

    incarnation: str  # of the balancer's process
    learned: Learned | None  # None: its rule learns nothing


class Lines:
    """Logs each change once."""

    def __init__(self) -> None:
        self._set_aside: dict[str, str | None] = {}  # as told
        self._too_large = 0  # as told

    def note_set_aside(self, replica_id: str, reason: str | None) -> None:
        """Why the replica gets no more work; None: it does."""
        if reason is not None and reason != self._set_aside.get(replica_id):
            log.warning(f"{replica_id} is set aside and gets no more work: it {reason}")
        self._set_aside[replica_id] = reason

    def note_too_large(self, rollouts: int) -> None:
        """How many of those that wait fit in no cache that takes work."""
        if rollouts > self._too_large:
            log.warning(f"{rollouts} of those that wait need a larger replica than any that takes work now")
        self._too_large = rollouts


class BalancerService:
    """The plain logic behind the actor; one event loop, no threads."""

    def __init__(
        self,
        rule: str = PLACEMENT.rule,
        *,
        placement: BalancerConfig = PLACEMENT,
        settle_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        meter: Meter = NO_METER,
    ) -> None:
        self._balancer = Balancer(rule, placement)
        self._meter = meter
        self._clock = clock
        self._incarnation = uuid4().hex[:12]
        self._payloads: dict[str, Any] = {}
        self._submitted_s: dict[str, float] = {}
        self._orders: dict[str, AckedQueue[Order]] = {}  # by replica
        self._waits = Waits()
        self._tally = Tally(self._balancer.snapshot())
        self._sampled_s = clock()
        self._lines = Lines()
        self._registered = asyncio.Event()
        self._empty = asyncio.Event()
        self._draining = False
        self._admit_from = clock() + settle_s
        if settle_s:
            self._registered.set()  # before it died; the only replica may have died as well, and take minutes
        self._tick: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Balancer({self._balancer.rule})"

    # -- the driver's side ----------------------------------------------------------------------------------------
    async def submit(self, items: Sequence[tuple[RolloutLoad, Any]], wait_s: float = 60.0) -> None:
        """Queue these rollouts with what their worker will need; known ones are left alone.

        Waits for a first replica to register, in this life of the actor or an earlier, so that one that can never fit
        is refused here: raises `NeverFits` with the numbers, `DeadlineExceeded` without, `ValueError` while draining.
        """
        if self._draining:
            raise ValueError("the balancer is draining and takes no more rollouts")
        if not self._registered.is_set():
            try:
                await asyncio.wait_for(self._registered.wait(), wait_s)
            except TimeoutError:
                raise DeadlineExceeded("submit", "balancer", "a first replica to register", wait_s) from None
        now = self._clock()
        self._balancer.submit([load for load, _ in items])
        for load, payload in items:
            self._payloads.setdefault(load.rollout_id, payload)
            self._submitted_s.setdefault(load.rollout_id, now)
        self._waits.begin([load.rollout_id for load, _ in items if not self._balancer.replica_of(load.rollout_id)], now)
        self._empty.clear()
        self._wake()

    async def cancel(self, rollout_ids: Sequence[str]) -> None:
        """These are not wanted any more, wherever they are."""
        for rollout_id in rollout_ids:
            holder = self._balancer.cancel(rollout_id)
            self._forget(rollout_id)
            if holder is not None:
                self._orders[holder].put(Cancel(rollout_id))
        self._wake()

    async def set_policy_version(self, policy_version: int) -> None:
        """Weights of this version are published to every replica."""
        self._balancer.set_policy_version(policy_version)

    async def withdraw_versions(self) -> None:
        """The learner goes back to a checkpoint: versions lower than those told before are no lies."""
        self._balancer.withdraw_versions()

    async def learned(self) -> Known:
        return Known(incarnation=self._incarnation, learned=self._balancer.learned())

    async def load_learned(self, learned: Learned) -> Known:
        """Take over what an earlier incarnation, or a resumed run, had learned; returns what is known then."""
        self._balancer.know_again(learned)
        return await self.learned()

    async def set_serving(self, replica_id: str, serving: bool) -> None:
        """False: nothing new goes to the replica."""
        self._balancer.set_serving(replica_id, serving)
        self._wake()

    async def missing(self, rollout_ids: Sequence[str]) -> list[str]:
        """Those of these rollouts that it could not give a worker."""
        return [name for name in rollout_ids if name not in self._payloads]

    async def held_by_lost(self, replica_id: str, unfinished: Sequence[str]) -> list[str]:
        """What a replica that is gone held, which gets nothing more; where this life of the actor does not know it,
        what of these no other holds, once those that live have had the time to register."""
        if self._balancer.knows(replica_id):
            self._balancer.set_serving(replica_id, False)
            return self._balancer.residents(replica_id)
        await asyncio.sleep(max(0.0, self._admit_from - self._clock()))
        return [name for name in unfinished if self._balancer.replica_of(name) is None]

    async def replica_lost(self, replica_id: str) -> list[str]:
        """The replica is dead: its rollouts wait again, from their last reported turn. Returns their ids.

        An id without a payload (its grant predates this life of the actor) is forgotten, and must be submitted again.
        """
        if not self._balancer.knows(replica_id):
            return []
        lost = self._balancer.remove_replica(replica_id)
        self._close_orders(replica_id)
        self._waits.begin(lost, self._clock())
        self._drop_unknown(lost)
        self._wake()
        return lost

    async def drain(self, wait_s: float) -> bool:
        """Take no more submissions and wait until nothing is left; False: time ran out."""
        self._draining = True
        self._note_if_empty()
        try:
            await asyncio.wait_for(self._empty.wait(), wait_s)
        except TimeoutError:
            return False
        return True

    async def resume(self) -> None:
        """Take submissions again after a drain."""
        self._draining = False

    async def snapshot(self) -> BalancerSnapshot:
        return self._balancer.snapshot()

    async def step_figures(self) -> PlacementFigures:
        """What was done since the last call; taken when a step has all its rollouts."""
        held_s = self._waits.take(self._clock())
        return self._tally.take(self._balancer.snapshot(), self._balancer.faults(), held_s)

    async def incarnation(self) -> str:
        """The id of this process of the balancer."""
        return self._incarnation

    def export(self) -> None:
        """What people watch, as it is now."""
        export(self._balancer.snapshot(), self._meter)

    # -- the workers' side ----------------------------------------------------------------------------------------
    async def register(self, replica: Registration) -> list[str]:
        """The replica serves. Returns the rollouts that it must stop, because another replica holds them."""
        name = replica.replica_id
        self._lines.note_set_aside(name, None)
        lost = self._balancer.add_replica(replica)
        self._close_orders(name)
        self._orders[name] = AckedQueue()
        stop = self._balancer.adopt(name, replica.resident)
        held = {load.rollout_id for load in replica.resident}
        back = [rollout_id for rollout_id in lost if rollout_id not in held]
        self._waits.begin(back, self._clock())
        self._drop_unknown(back)
        self._registered.set()
        self._wake()
        return stop

    async def report(
        self,
        replica_id: str,
        turn_reports: Sequence[TurnReport],
        finished: Sequence[Finished],
        load: ReplicaLoad | None = None,
    ) -> list[Move]:
        """One tick of one replica: turns and rollouts that ended, and the engine's load.

        Returns the moves decided for it now; they are among the next orders as well. Raises `UnknownReplica` after the
        balancer has come back: register again. A report that cannot be true sets the replica aside (see `snapshot`).
        """
        if not self._balancer.knows(replica_id):
            raise UnknownReplica(f"replica {replica_id!r} is not registered; register it with what is resident")
        for report in turn_reports:
            self._balancer.turn_finished(replica_id, report)
        for end in finished:
            if self._balancer.finished(replica_id, end):
                self._forget(end.rollout_id)
        if load is not None:
            self._balancer.replica_report(replica_id, load)
        self._lines.note_set_aside(replica_id, self._balancer.set_aside(replica_id))
        moves = self._decide()
        self._sample()
        self._note_if_empty()
        return [move for move in moves if move.from_replica == replica_id]

    async def next_orders(self, replica_id: str, acknowledged: int, wait_s: float) -> Batch[Order]:
        """The orders after number `acknowledged`; waits up to `wait_s` for the first, and is empty where none came.

        Raises `UnknownReplica` when it must register (again).
        """
        if replica_id not in self._orders:
            raise UnknownReplica(f"replica {replica_id!r} is not registered; register it with what is resident")
        return await self._orders[replica_id].take(acknowledged, wait_s)

    def _close_orders(self, replica_id: str) -> None:
        """A poll that is still open ends: its replica must register."""
        if (orders := self._orders.pop(replica_id, None)) is not None:
            orders.close(UnknownReplica(f"replica {replica_id!r} was removed while it waited; register it again"))

    async def return_rollouts(self, replica_id: str, items: Sequence[tuple[RolloutLoad, Any]]) -> None:
        """A worker hands back rollouts, to go on elsewhere from the payload it gives with them."""
        accepted = set(self._balancer.returned(replica_id, [load for load, _ in items]))
        for load, payload in items:
            if load.rollout_id in accepted:
                self._payloads[load.rollout_id] = payload
        self._waits.begin(accepted, self._clock())
        self._wake()

    # -- inside ---------------------------------------------------------------------------------------------------
    def _wake(self) -> None:
        """Decide in this turn of the loop, once for all calls that came in together."""
        if self._tick is None:
            delay = max(0.0, self._admit_from - self._clock())
            self._tick = asyncio.get_running_loop().call_later(delay, self._decide_soon)

    def _decide_soon(self) -> None:
        self._tick = None
        self._decide()
        self._note_if_empty()

    def _decide(self) -> tuple[Move, ...]:
        now = self._clock()
        if now < self._admit_from:
            self._wake()  # timers may fire a little early
            return ()
        decisions = self._balancer.decide(limit=DECISIONS_AT_ONCE)
        self._deliver(decisions, now)
        self._waits.note(self._balancer.books.held_up(), now)
        self._lines.note_too_large(len(self._balancer.books.parked))
        if len(decisions.admissions) == DECISIONS_AT_ONCE:
            self._wake()  # other calls first
        return decisions.moves

    def _deliver(self, decisions: Decisions, now: float) -> None:
        for admission in decisions.admissions:
            self._orders[admission.replica_id].put(self._grant(admission, now))
        for move in decisions.moves:
            self._orders[move.from_replica].put(move)

    def _grant(self, admission: Admission, now: float) -> Grant:
        load = self._balancer.load_of(admission.rollout_id)
        assert load is not None
        waited_from = self._submitted_s.get(admission.rollout_id)
        waited_s = 0.0 if waited_from is None else now - waited_from
        if waited_from is not None:
            self._tally.waited(waited_s)
            self._meter.observe("rstar_balancer_wait_seconds", waited_s)
        queued_s, held_s = self._waits.end(admission.rollout_id, now)
        expected_tokens = self._balancer.reserved_tokens(admission.replica_id)
        placed = self._balancer.books.placement(admission.rollout_id, expected_tokens)
        return Grant(
            load=load,
            payload=self._payloads[admission.rollout_id],
            waited_s=waited_s,
            placement=replace(placed, waited_s=round(queued_s, 3), held_s=held_s),
        )

    def _sample(self) -> None:
        now = self._clock()
        if now >= self._sampled_s + SAMPLE_EVERY_S:
            self._sampled_s = now
            self._tally.sample(self._balancer.snapshot())

    def _drop_unknown(self, rollout_ids: Sequence[str]) -> None:
        """Waiting again without a payload: only whoever submitted it can bring it back."""
        for rollout_id in rollout_ids:
            if rollout_id not in self._payloads and self._balancer.replica_of(rollout_id) is None:
                self._balancer.cancel(rollout_id)

    def _forget(self, rollout_id: str) -> None:
        self._payloads.pop(rollout_id, None)
        self._submitted_s.pop(rollout_id, None)
        self._waits.forget(rollout_id)

    def _note_if_empty(self) -> None:
        if not self._payloads and self._balancer.books.in_flight == 0:
            if not self._empty.is_set():  # idle from now on
                for fault in self._balancer.faults():
                    log.warning(f"nothing is left to run, but {fault}")
            self._empty.set()
        else:
            self._empty.clear()


def export(now: BalancerSnapshot, meter: Meter) -> None:
    """What people watch of the balancer."""
    meter.set("rstar_balancer_waiting", now.waiting)
    meter.set("rstar_balancer_in_flight", now.in_flight)
    if capacity := sum(replica.kv_capacity_tokens for replica in now.replicas):
        used = sum(replica.kv_used_tokens for replica in now.replicas)
        reserved = sum(replica.kv_reserved_tokens for replica in now.replicas)
        meter.set("rstar_balancer_kv_used_ratio", used / capacity)
        meter.set("rstar_balancer_kv_reserved_ratio", reserved / capacity)
    meter.set("rstar_balancer_replicas", len(now.replicas))
    set_aside = [replica for replica in now.replicas if replica.set_aside is not None]
    meter.set("rstar_balancer_replicas_set_aside", len(set_aside))
    meter.reached("rstar_balancer_moves_total", now.moves)
    meter.reached("rstar_balancer_preemptions_total", now.preemptions)
    meter.reached("rstar_balancer_recomputed_tokens_total", now.recomputed_tokens)


class BalancerActor(BalancerService):
    """Ray's view of one `BalancerService`, started by `start_balancer`."""

    def __init__(
        self,
        rule: str = PLACEMENT.rule,
        *,
        placement: BalancerConfig = PLACEMENT,
        settle_s: float = 5.0,
        run: str = "",
    ) -> None:
        reborn = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(
            rule,
            placement=placement,
            settle_s=settle_s if reborn else 0.0,
            meter=ray_meter(run),
        )
        self._alive = Alive()

    async def probe(self) -> Sign:
        with self._meter.guarded():
            self.export()
        return self._alive.sign()


def start_balancer(
    config: BalancerConfig, *, run: str = "", settle_s: float = 5.0, **options: Any
) -> Remote[BalancerService]:
    """The actor under the name "balancer"; `options` are Ray's."""
    shared = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": 4096}
    actor: Any = ray.remote(BalancerActor).options(**{"name": "balancer"} | shared | options)
    return Remote(actor.remote(config.rule, placement=config, run=run, settle_s=settle_s), "balancer")
