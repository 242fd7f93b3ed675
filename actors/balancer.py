"""The Balancer actor: grants by long-poll, woken by events; every rule of placement lives in scheduler/.

Workers and driver call it in batches. A worker registers, then keeps one `next_grants` open and sends one `report` per
tick; the driver submits payloads (opaque here) that come out again with the grant. Grants are numbered and delivered
again until acknowledged, so a cancelled long-poll loses nothing; a worker skips the rollouts it knows.

When the actor dies Ray starts an empty one. Callers see a new `epoch` in the grants (or `UnknownReplica`): workers
register again with what is resident, the driver submits everything unfinished again (known rollouts are left alone).
Until `settle_s` have passed after such a start nothing is admitted, so that nothing resident is granted twice.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import ray

from rstar_ray.errors import DeadlineExceeded
from scheduler.balancer import Balancer
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

DECISIONS_AT_ONCE = 1024  # then the event loop serves other calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Run this rollout: from its payload, at the lengths of its load."""

    load: RolloutLoad
    payload: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Everything decided for one replica since what it acknowledged; `number` is what to acknowledge next."""

    number: int
    epoch: str  # of the balancer's life
    admissions: tuple[Grant, ...] = ()
    moves: tuple[Move, ...] = ()  # hand these back at their next turn boundary
    cancels: tuple[str, ...] = ()  # stop these; nobody wants their result


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTimes:
    """Seconds from submission to grant, of the last 16,384 grants."""

    p50_s: float = 0.0
    p99_s: float = 0.0
    longest_waiting_s: float = 0.0  # of those that wait now


@dataclass(slots=True)
class _Mailbox:
    """What a replica has not acknowledged yet."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    letters: deque[Grants] = field(default_factory=deque[Grants])
    number: int = 0


class BalancerService:
    """The plain logic behind the actor; one event loop, no threads."""

    def __init__(
        self,
        rule: str = "expected_kv",
        *,
        risk: float = 0.01,
        settle_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._balancer = Balancer(rule, risk=risk)
        self._rule_name = rule
        self._clock = clock
        self._epoch = uuid4().hex[:12]
        self._payloads: dict[str, Any] = {}
        self._submitted_s: dict[str, float] = {}
        self._mailboxes: dict[str, _Mailbox] = {}
        self._waits: deque[float] = deque(maxlen=16_384)
        self._registered = asyncio.Event()
        self._empty = asyncio.Event()
        self._draining = False
        self._admit_from = clock() + settle_s
        self._tick: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Balancer({self._rule_name})"

    # -- the driver's side ----------------------------------------------------------------------------------------
    async def submit(self, items: Sequence[tuple[RolloutLoad, Any]], wait_s: float = 60.0) -> None:
        """Queue these rollouts with what their worker will need; known ones are left alone.

        Waits for a first replica to register, so that one that can never fit is refused here: raises `NeverFits`
        with the numbers, `DeadlineExceeded` without a replica, `ValueError` while draining.
        """
        if self._draining:
            raise ValueError("the balancer is draining and takes no more rollouts")
        if not self._registered.is_set():
            try:
                await asyncio.wait_for(self._registered.wait(), wait_s)
            except TimeoutError:
                raise DeadlineExceeded("submit", "balancer", "a first replica to register", wait_s) from None
        now = self._clock()
        self._balancer.submit([load for load, _ in items], now_s=now)
        for load, payload in items:
            self._payloads.setdefault(load.rollout_id, payload)
            self._submitted_s.setdefault(load.rollout_id, now)
        self._empty.clear()
        self._wake()

    async def cancel(self, rollout_ids: Sequence[str]) -> None:
        """These are not wanted any more, wherever they are."""
        for rollout_id in rollout_ids:
            holder = self._balancer.cancel(rollout_id)
            self._forget(rollout_id)
            if holder is not None:
                self._post(holder, cancels=(rollout_id,))
        self._wake()

    async def set_policy_version(self, policy_version: int) -> None:
        """Weights of this version are published to every replica."""
        self._balancer.set_policy_version(policy_version)

    async def set_serving(self, replica_id: str, serving: bool) -> None:
        """False: nothing new goes to the replica."""
        self._balancer.set_serving(replica_id, serving)
        self._wake()

    async def replica_lost(self, replica_id: str) -> list[str]:
        """The replica is dead: its rollouts wait again, from their last reported turn. Returns their ids.

        An id without a payload (its grant predates this life of the actor) is forgotten, and must be submitted again.
        """
        if not self._balancer.knows(replica_id):
            return []
        lost = self._balancer.remove_replica(replica_id)
        self._close(replica_id)
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

    async def wait_times(self) -> WaitTimes:
        waits = sorted(self._waits)
        now = self._clock()
        oldest = min((at for name, at in self._submitted_s.items() if not self._balancer.replica_of(name)), default=now)
        if not waits:
            return WaitTimes(longest_waiting_s=now - oldest)
        return WaitTimes(
            p50_s=waits[len(waits) // 2], p99_s=waits[(len(waits) * 99) // 100], longest_waiting_s=now - oldest
        )

    async def ping(self) -> str:
        """The epoch; for liveness."""
        return self._epoch

    # -- the workers' side ----------------------------------------------------------------------------------------
    async def register(
        self,
        replica_id: str,
        kv_capacity_tokens: int,
        max_running: int,
        policy_version: int = 0,
        resident: Sequence[RolloutLoad] = (),
    ) -> Grants:
        """A replica serves. `resident`: what it runs already, when it or the balancer has come back.

        Returns the number to acknowledge first, and in `cancels` what the replica must stop.
        """
        known = self._balancer.knows(replica_id)
        lost = self._balancer.add_replica(
            replica_id, kv_capacity_tokens, max_running=max_running, policy_version=policy_version
        )
        if known:
            self._close(replica_id)
        mailbox = self._mailboxes[replica_id] = _Mailbox()
        stop = self._balancer.adopt(replica_id, resident)
        held = {load.rollout_id for load in resident}
        self._drop_unknown([name for name in lost if name not in held])
        self._registered.set()
        self._wake()
        return Grants(number=mailbox.number, epoch=self._epoch, cancels=tuple(stop))

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
        moves = self._decide()
        self._note_if_empty()
        return [move for move in moves if move.from_replica == replica_id]

    async def next_grants(self, replica_id: str, ack: int, wait_s: float) -> Grants:
        """Wait up to `wait_s` for what is decided for this replica after number `ack`; empty when nothing came.

        Raises `UnknownReplica` when it must register (again).
        """
        mailbox = self._mailboxes.get(replica_id)
        if mailbox is None:
            raise UnknownReplica(f"replica {replica_id!r} is not registered; register it with what is resident")
        while mailbox.letters and mailbox.letters[0].number <= ack:
            mailbox.letters.popleft()
        if not mailbox.letters:
            mailbox.event.clear()
            try:
                await asyncio.wait_for(mailbox.event.wait(), wait_s)
            except TimeoutError:
                return Grants(number=ack, epoch=self._epoch)
            if self._mailboxes.get(replica_id) is not mailbox:
                raise UnknownReplica(f"replica {replica_id!r} was removed while it waited; register it again")
        return Grants(
            number=mailbox.letters[-1].number if mailbox.letters else ack,
            epoch=self._epoch,
            admissions=tuple(grant for letter in mailbox.letters for grant in letter.admissions),
            moves=tuple(move for letter in mailbox.letters for move in letter.moves),
            cancels=tuple(name for letter in mailbox.letters for name in letter.cancels),
        )

    async def return_rollouts(self, replica_id: str, items: Sequence[tuple[RolloutLoad, Any]]) -> None:
        """Between turns a worker hands back rollouts, to go on elsewhere from the payload it gives with them."""
        accepted = set(self._balancer.returned(replica_id, [load for load, _ in items]))
        for load, payload in items:
            if load.rollout_id in accepted:
                self._payloads[load.rollout_id] = payload
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
            self._post(replica_id, tuple(grants.get(replica_id, ())), tuple(moves.get(replica_id, ())))

    def _grant(self, admission: Admission, now: float) -> Grant:
        load = self._balancer.load_of(admission.rollout_id)
        assert load is not None
        waited_from = self._submitted_s.get(admission.rollout_id)
        if waited_from is not None:
            self._waits.append(now - waited_from)
        return Grant(load=load, payload=self._payloads[admission.rollout_id])

    def _post(
        self,
        replica_id: str,
        admissions: tuple[Grant, ...] = (),
        moves: tuple[Move, ...] = (),
        cancels: tuple[str, ...] = (),
    ) -> None:
        mailbox = self._mailboxes[replica_id]
        mailbox.number += 1
        mailbox.letters.append(
            Grants(number=mailbox.number, epoch=self._epoch, admissions=admissions, moves=moves, cancels=cancels)
        )
        mailbox.event.set()

    def _close(self, replica_id: str) -> None:
        """Wake whoever still waits for this replica's grants; it will be told to register."""
        mailbox = self._mailboxes.pop(replica_id, None)
        if mailbox is not None:
            mailbox.event.set()

    def _drop_unknown(self, rollout_ids: Sequence[str]) -> None:
        """Waiting again without a payload: only whoever submitted it can bring it back."""
        for rollout_id in rollout_ids:
            if rollout_id not in self._payloads and self._balancer.replica_of(rollout_id) is None:
                self._balancer.cancel(rollout_id)

    def _forget(self, rollout_id: str) -> None:
        self._payloads.pop(rollout_id, None)
        self._submitted_s.pop(rollout_id, None)

    def _note_if_empty(self) -> None:
        if not self._payloads and self._balancer.in_flight == 0:
            self._empty.set()
        else:
            self._empty.clear()


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=4096)  # pyright: ignore[reportCallIssue]
class BalancerActor(BalancerService):
    """Ray's view of one `BalancerService`; created under the name "balancer"."""

    def __init__(self, rule: str = "expected_kv", *, risk: float = 0.01, settle_s: float = 5.0) -> None:
        reborn = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(rule, risk=risk, settle_s=settle_s if reborn else 0.0)
