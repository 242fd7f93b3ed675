"""The Balancer actor: grants by long-poll, woken by events; every rule of placement lives in scheduler/.

Workers and driver call it in batches. A worker registers, then keeps one `next_grants` open and sends one `report` per
tick; the driver submits payloads (opaque here) that come out again with the grant. Grants are numbered and delivered
again until acknowledged, so a cancelled long-poll loses nothing; a worker skips the rollouts it knows.

When the actor dies Ray starts an empty one. Callers see a new `epoch` in the grants (or `UnknownReplica`): workers
register again with what is resident, the driver teaches it what had been learned and submits everything unfinished
again (known rollouts are left alone). Until `settle_s` have passed after such a start nothing is admitted, so that
nothing resident is granted twice.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import ray

from actors.mailbox import Grant, Grants, Mailboxes
from actors.meter import ray_meter
from actors.probe import Alive
from actors.probe import Sign as ProbeSign
from rstar_ray.config import BalancerConfig
from rstar_ray.errors import DeadlineExceeded
from rstar_ray.run_dir.metrics import PlacementFigures
from rstar_ray.telemetry.meter import NO_METER, Meter
from scheduler.balancer import PLACEMENT, Balancer
from scheduler.cost import EngineCost
from scheduler.learned import Learned
from scheduler.load import (
    Admission,
    BalancerSnapshot,
    Decisions,
    Finished,
    Move,
    ReplicaLoad,
    RolloutLoad,
    TurnReport,
    UnknownReplica,
)
from scheduler.tally import Tally
from scheduler.waits import Waits

DECISIONS_AT_ONCE = 1024  # then the event loop serves other calls


SAMPLE_EVERY_S = 0.25  # of waiting, in flight and KV, for the figures of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of life, and what people should be shown since the last one."""

    epoch: str  # of the balancer's life
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the balancer has learned that outlives a step."""

    epoch: str  # of the balancer's life
    learned: Learned | None  # None: its rule learns nothing


class Lines:
    """What people are to be shown, once each."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._set_aside: dict[str, str | None] = {}  # as told
        self._too_large = 0  # as told

    def take(self) -> tuple[str, ...]:
        taken, self._waiting = self._waiting, []
        return tuple(taken)

    def add(self, line: str) -> None:
        self._waiting.append(line)

    def note_set_aside(self, replica_id: str, reason: str | None) -> None:
        """Why the replica gets no more work; None: it does."""
        if reason is not None and reason != self._set_aside.get(replica_id):
            self.add(f"balancer: {replica_id} is set aside and gets no more work: it {reason}")
        self._set_aside[replica_id] = reason

    def note_too_large(self, rollouts: int) -> None:
        """How many of those that wait fit in no cache that takes work."""
        if rollouts > self._too_large:
            self.add(f"balancer: {rollouts} of those that wait need a larger replica than any that takes work now")
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
        self._epoch = uuid4().hex[:12]
        self._payloads: dict[str, Any] = {}
        self._submitted_s: dict[str, float] = {}
        self._mailboxes = Mailboxes(self._epoch)
        self._waits = Waits()
        self._tally = Tally(self._balancer.snapshot())
        self._sampled_s = clock()
        self._lines = Lines()
        self._registered = asyncio.Event()
        self._empty = asyncio.Event()
        self._draining = False
        self._admit_from = clock() + settle_s
        if settle_s:
            self._registered.set()  # in the life before this; the only replica may have died along, and take minutes
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
                self._mailboxes.post(holder, cancels=(rollout_id,))
        self._wake()

    async def set_policy_version(self, policy_version: int) -> None:
        """Weights of this version are published to every replica."""
        self._balancer.set_policy_version(policy_version)

    async def withdraw_versions(self) -> None:
        """The learner goes back to a checkpoint: versions lower than those told before are no lies."""
        self._balancer.withdraw_versions()

    async def learned(self) -> Known:
        return Known(epoch=self._epoch, learned=self._balancer.learned())

    async def know_again(self, learned: Learned) -> Known:
        """As the life before did, or the run that this one goes on with; what is known then."""
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
        self._mailboxes.close(replica_id)
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

    async def sign(self) -> Sign:
        """The epoch, for liveness; and, once each, what people should know of it (`Lines`)."""
        return Sign(epoch=self._epoch, lines=self._lines.take())

    def export(self) -> None:
        """What people watch, as it is now."""
        export(self._balancer.snapshot(), self._meter)

    # -- the workers' side ----------------------------------------------------------------------------------------
    async def register(
        self,
        replica_id: str,
        kv_capacity_tokens: int,
        *,
        max_running: int,
        block_tokens: int,
        policy_version: int = 0,
        resident: Sequence[RolloutLoad] = (),
        cost: EngineCost | None = None,
    ) -> Grants:
        """A replica serves. `resident`: what it runs already, when it or the balancer has come back; `cost`: measured.

        Returns the number to acknowledge first, and in `cancels` what the replica must stop.
        """
        self._lines.note_set_aside(replica_id, None)
        lost = self._balancer.add_replica(
            replica_id,
            kv_capacity_tokens,
            max_running=max_running,
            block_tokens=block_tokens,
            policy_version=policy_version,
            cost=cost,
        )
        number = self._mailboxes.open(replica_id)
        stop = self._balancer.adopt(replica_id, resident)
        held = {load.rollout_id for load in resident}
        back = [name for name in lost if name not in held]
        self._waits.begin(back, self._clock())
        self._drop_unknown(back)
        self._registered.set()
        self._wake()
        return Grants(number=number, epoch=self._epoch, cancels=tuple(stop))

    async def report(
        self,
        replica_id: str,
        turn_reports: Sequence[TurnReport],
        finished: Sequence[Finished],
        load: ReplicaLoad | None = None,
    ) -> list[Move]:
        """One tick of one replica: turns and rollouts that ended, and the engine's load.

        Returns the moves decided for it now; they are in the next grants as well. Raises `UnknownReplica` after the
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

    async def next_grants(self, replica_id: str, ack: int, wait_s: float) -> Grants:
        """Wait up to `wait_s` for what is decided for this replica after number `ack`; empty when nothing came.

        Raises `UnknownReplica` when it must register (again).
        """
        return await self._mailboxes.next(replica_id, ack, wait_s)

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
        grants: dict[str, list[Grant]] = {}
        moves: dict[str, list[Move]] = {}
        for admission in decisions.admissions:
            grants.setdefault(admission.replica_id, []).append(self._grant(admission, now))
        for move in decisions.moves:
            moves.setdefault(move.from_replica, []).append(move)
        for replica_id in grants.keys() | moves.keys():
            self._mailboxes.post(replica_id, admissions=grants.get(replica_id, ()), moves=moves.get(replica_id, ()))

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
                    self._lines.add(f"balancer: nothing is left to run, but {fault}")
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


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=4096)  # pyright: ignore[reportCallIssue]
class BalancerActor(BalancerService):
    """Ray's view of one `BalancerService`; created under the name "balancer"."""

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

    async def probe(self) -> ProbeSign:
        with self._meter.guarded():
            self.export()
        return self._alive.sign()
