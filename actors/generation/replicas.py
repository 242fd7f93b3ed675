"""The generation workers of a run, as the driver holds them: started, given weights, and brought back when lost."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from actors.balancer_service import BalancerService
from actors.cluster.gpu_lock import ANYTIME, Turn
from actors.generation.generation_actor import GenerationActor
from actors.generation.rollout_client import BLIP_PATIENCE_S, CALL_DEADLINE_S, RolloutClient, last_line
from actors.health.lost_nodes import no_node
from actors.health.watchdog import BACK_S, Guard
from actors.remote import Remote
from actors.weights.transfer import EngineSeat, LoadedWeights, Publication
from rstar_ray.chat.template import ChatFormat
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, LearnerError, RankLost, RStarError, VersionGone
from rstar_ray.run_dir.metrics import BalancerStats
from rstar_ray.telemetry.meter import NO_METER, Meter

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")

ASK_AGAIN_S = 0.2
MAX_LOSSES_IN_A_ROW = 4
"""Of one worker, without anything that got on in between, before the run ends: a node takes many at once."""
SERVED_WELL_S = 60.0
"""A worker that served for so long before it was lost does not die of its start, nor of its first work."""
START_PATIENCE = 3.0
"""While its engine starts, an actor may be silent for so many times its limit: a library that is loaded holds it up."""
SAY_AFTER_S = 10.0
LOOK_AGAIN_S = 0.5


class Replicas:
    """Workers by name, and the rollouts handed to them."""

    def __init__(
        self,
        balancer: Remote[BalancerService],
        chat: ChatFormat,
        *,
        watch: Guard,
        silent_s: float,
        node_away_s: float = math.inf,
        weights_deadline_s: float = CALL_DEADLINE_S,
        journal: Path | None = None,
        meter: Meter = NO_METER,
        store_again: Callable[[int], Awaitable[Publication]] | None = None,
        turn: Turn = ANYTIME,
    ) -> None:
        """`weights_deadline_s`: longest a worker may take for new weights. `silent_s`: how long it may leave `watch`
        without an answer. `node_away_s`: how long all may be without a node. `journal`: where they keep
        what was sampled. `store_again`: what the learner holds, in the object store, for a worker that was not there
        when a version was sent. In its `turn` an engine starts."""
        self._turn = turn
        self._node_away_s = node_away_s
        self._meter = meter
        self._weights_deadline_s = weights_deadline_s
        self.workers: dict[str, Remote[GenerationActor]] = {}
        self.rollouts = RolloutClient(balancer, chat, on_worker_lost=self._lost, journal=journal, silent_s=silent_s)
        self._balancer = balancer
        self._start_deadlines_s: dict[str, float] = {}
        self._incarnations: dict[str, str] = {}  # of the workers' processes
        self._watch = watch
        self._silent_s = silent_s
        self._losses_in_a_row: dict[str, int] = {}  # of each
        self._ended_at_loss: dict[str, int] = {}  # rollouts, at its latest loss
        self._serves_since_s: dict[str, float] = {}  # each that does
        self._coming_back: set[str] = set()  # lost workers; they take the newest weights before they serve
        self._back: set[str] = set()  # since seats were given out: what they took from there, they have no more
        self._starting: asyncio.Task[None] | None = None
        self._published: Publication | None = None
        self._store_again = store_again
        self._stored: asyncio.Task[Publication] | None = None  # the newest version, where it was sent and not stored
        self.publish_metrics: dict[str, float] = {}  # of the newest publish

    @property
    def there(self) -> dict[str, Remote[GenerationActor]]:
        """The workers that are not on their way back."""
        return {name: worker for name, worker in self.workers.items() if name not in self._coming_back}

    def add(self, worker: Remote[GenerationActor], *, start_deadline_s: float) -> None:
        """A worker's actor, whose engine is not started yet."""
        name = worker.name
        self.workers[name] = worker
        self._start_deadlines_s[name] = start_deadline_s

    def start(self) -> None:
        """Start every engine; `serving` says when they are up. One that cannot ends the run, whatever it waits for."""
        self._starting = asyncio.create_task(self._start(list(self.workers)))
        self._starting.add_done_callback(self._end_run_if_failed)

    async def serving(self) -> None:
        """Wait until every engine is up that is not lost, and one at least; raises what kept one from it."""
        seconds = (1 + MAX_LOSSES_IN_A_ROW) * (max(self._start_deadlines_s.values()) + self._node_away_s)
        await within(self._until_up(), seconds, waiter="driver", owner="generation", reason=self._not_up)

    def _not_up(self) -> str:
        return f"engines of {', '.join(sorted(self.workers.keys() - self._serves_since_s.keys()))}"

    async def _until_up(self) -> None:
        assert self._starting is not None
        while not self._starting.done():
            if self.there and self.there.keys() <= self._serves_since_s.keys():
                return
            await asyncio.wait({self._starting}, timeout=LOOK_AGAIN_S)
        self._starting.result()

    def _end_run_if_failed(self, starting: "asyncio.Task[None]") -> None:
        """Nobody may wait for engines for hours yet: supervised fine-tuning needs none."""
        if not starting.cancelled() and isinstance(fault := starting.exception(), Exception):
            self._watch.end_run(fault)

    def seats(self, senders: Mapping[int, int], *, ranks: int) -> list[EngineSeat]:
        """Who is there to be sent weights, by the numbers of their senders. `ranks`: that an engine is split over."""
        self._back.clear()
        return [
            EngineSeat(name=name, life=self._incarnations[name], ranks=ranks, sender=senders[number])
            for number, name in enumerate(self.workers)
            if number in senders and name in self.there
        ]

    async def publish(self, weights: Publication) -> None:
        """Have every replica serve these weights; returns when all do. Those that were sent them do already."""
        await self.serving()
        self._published, self._stored = weights, None
        self.rollouts.weights = weights.checksum
        for name, reason in weights.failed.items():
            log.info(f"{name} did not take version {weights.policy_version} by {weights.way}: {reason}")
        for name, pulled in weights.took.items():
            _refuse_others(name, pulled, weights)
        missed = [name for name in self.there if name not in weights.took or name in self._back]
        pulled = await asyncio.gather(*(self._pull_unless_lost(name, weights) for name in missed))
        took = [*weights.took.values(), *(one for one in pulled if one is not None)]
        self.publish_metrics = _publish_metrics(weights, took)
        await self.rollouts.memory.note()  # so that one which began empty has what the new version lets fade
        version = weights.policy_version
        await self._ask(self._balancer, lambda b: b.set_policy_version(version), "the policy version", retry=True)
        await self.rollouts.memory.note()  # of the step that is over

    async def withdraw(self) -> None:
        """Give up what was handed in and not finished: the learner goes back to a checkpoint, and so do versions."""
        await self.rollouts.abandon()
        await self._ask(self._balancer, lambda b: b.withdraw_versions(), "taking back the policy versions", retry=True)

    async def placed(self) -> BalancerStats:
        """What the balancer did since this was asked last."""
        return await self._ask(self._balancer, lambda b: b.step_figures(), "the step's figures", retry=True)

    async def close(self) -> None:
        """Stop starting and following; the actors themselves end with the run's others."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        await self.rollouts.close()

    async def _start(self, names: Sequence[str]) -> None:
        """Engines up, then the current weights, then work."""

        async def start(name: str) -> None:
            while True:
                try:
                    return await self._bring_up(name)
                except (RayActorError, RayTaskError, DeadlineExceeded) as lost:
                    if _waited_for_another(lost, name) or (_lives(lost) and name not in self._coming_back):
                        log.info(f"{name} did not come up: {last_line(lost)}")
                        raise  # one that has never served is the run's to refuse
                    self._coming_back.add(name)
                    self._count_loss(name, lost)  # once more: it, or its engine, may have been killed in its start
                    if _lives(lost):
                        await self.workers[name].restart()
                    await self._up_again(name)

        await asyncio.gather(*(start(name) for name in names))

    async def _bring_up(self, name: str) -> None:
        worker, deadline_s = self.workers[name], self._start_deadlines_s[name]
        self._watch.follow_start(name, worker.handle, silent_s=START_PATIENCE * self._silent_s)
        async with self._turn():
            facts = await worker.call(lambda w: w.start(), deadline_s=deadline_s, reason="its engine")
        # Before it is among those who are there: a publish seats it by its incarnation.
        self._incarnations[name] = (await self._ask(worker, lambda w: w.probe(), "a sign of life")).life
        await self._pull_newest(name, deadline_s)
        self._back |= self._coming_back & {name}
        self._coming_back.discard(name)
        await self._ask(worker, lambda w: w.serve(), "its loops")
        self.rollouts.follow(worker, self._incarnations[name])
        self._watch.follow(name, worker.handle, silent_s=self._silent_s)
        self._serves_since_s[name] = time.monotonic()
        log.info(f"{name}: {facts.kv_capacity_tokens:,} KV tokens")

    async def _lost(self, name: str, lost: Exception) -> None:
        """Its rollouts go on elsewhere; Ray has started the actor again and it gets today's weights.

        One whose own loops have failed lives, and is of no use: it is killed.
        """
        self._coming_back.add(name)
        self._watch.leave(name)
        self._count_loss(name, lost)
        if not _is_gone(lost):
            await self.workers[name].restart()
        if num_kept := await self.rollouts.go_on_without(name):
            log.info(f"{name}: of {num_kept} unfinished rollouts what was sampled is kept")
        await self._up_again(name)
        await self._start([name])

    async def _up_again(self, name: str) -> None:
        """Wait for its process, which Ray starts where its bundle has a node: without end while others serve.

        Raises `RStarError` where none does for `node_away_s`.
        """
        up = asyncio.ensure_future(self.workers[name].until_answered(lambda w: w.probe()))
        saying = asyncio.get_running_loop().call_later(SAY_AFTER_S, self._say_it_waits, name)
        patience_s = self._silent_s + BACK_S
        ending = asyncio.create_task(_end_what_is_silent(self.workers[name], patience_s))
        try:
            while not up.done():
                if self.there:  # nothing waits for this one
                    await asyncio.wait({up}, timeout=LOOK_AGAIN_S)
                else:
                    nobody = self._until_up_or_another(up)
                    await within(nobody, self._node_away_s, waiter="driver", owner="Ray", reason=f"a node for {name}")
            await up
        except DeadlineExceeded as late:
            raise no_node(name, self._node_away_s) from late
        finally:
            saying.cancel()
            ending.cancel()
            up.cancel()

    async def _until_up_or_another(self, up: "asyncio.Future[Any]") -> None:
        while not self.there and not up.done():
            await asyncio.wait({up}, timeout=LOOK_AGAIN_S)

    def _say_it_waits(self, name: str) -> None:
        serve = self.there.keys() & self._serves_since_s.keys()
        log.info(f"{name} waits for its process, or a node: {len(serve)} of {len(self.workers)} replicas serve")

    def _count_loss(self, name: str, lost: Exception) -> None:
        """Any number over a run, as long as rollouts end in between, or it serves for a while: in supervised
        fine-tuning and in an update there are none. Raises `RStarError` otherwise."""
        ended, row = self.rollouts.num_ended, self._losses_in_a_row.get(name, 0)
        served_s = time.monotonic() - self._serves_since_s.pop(name, math.inf)
        got_on = ended > self._ended_at_loss.get(name, 0) or served_s >= SERVED_WELL_S
        row = self._losses_in_a_row[name] = 1 if got_on else row + 1
        self._ended_at_loss[name] = ended
        log.info(f"{name} was lost ({type(lost).__name__ if _is_gone(lost) else last_line(lost)}) and starts again")
        self._meter.add("rstar_losses_total", 1, part="replica")
        if row > MAX_LOSSES_IN_A_ROW:
            raise RStarError(
                f"{name} was lost: {row} of its losses without a rollout that ended in between, or "
                f"{SERVED_WELL_S:g} s in which it served, the last {type(lost).__name__}: {lost}"
            )

    async def _pull_unless_lost(self, name: str, weights: Publication) -> LoadedWeights | None:
        """A worker that dies meanwhile takes the newest weights when it comes back; one that could not be reached for
        a moment takes them now, before it serves another token. One that cannot take them is started again."""
        while True:
            try:
                return await self._pull(name, weights)
            except (RayTaskError, DeadlineExceeded) as failed:  # before the next: it may be both
                if _waited_for_another(failed, name):
                    raise
                log.info(f"{name} did not take version {weights.policy_version}: {last_line(failed)}")
                await self.workers[name].restart()
                return None
            except RayActorError as lost:
                judged = self._is_as_it_was(name)
                if not await within(judged, self._weights_deadline_s, waiter="driver", owner=name, reason="a sign"):
                    log.info(f"{name} did not take version {weights.policy_version}: {type(lost).__name__}")
                    return None
                log.info(f"{name} answers again after {type(lost).__name__}: it is given the weights again")

    async def _is_as_it_was(self, name: str) -> bool:
        """Wait until it answers, or is known to be lost: between the two it might go on with the weights it has."""
        while name not in self._coming_back:
            if (found := await self.workers[name].incarnation(BLIP_PATIENCE_S)) is not None:
                return found == self._incarnations[name]
            await asyncio.sleep(ASK_AGAIN_S)
        return False

    async def _pull_newest(self, name: str, deadline_s: float) -> None:
        """Where the rank that published them has died, those that the learner publishes when it has started again."""
        pulled: Publication | None = None
        while self._published is not None and pulled is not self._published:
            pulled = self._published
            try:
                await self._pull(name, pulled)
            except LearnerError:
                again = self._published_after(pulled)
                await within(again, deadline_s, waiter=name, owner="learner", reason="weights after it starts again")

    async def _published_after(self, weights: Publication) -> None:
        while self._published is weights:
            await asyncio.sleep(ASK_AGAIN_S)

    async def _in_store(self, weights: Publication) -> Publication:
        """The same weights in the object store: where they were sent and not put there, the learner is asked, once.

        Raises `VersionGone` where it has gone on since.
        """
        if weights.refs or self._store_again is None:
            return weights
        if self._stored is None:
            log.info(f"version {weights.policy_version} goes through the object store for who missed it")
            self._stored = asyncio.ensure_future(self._store_again(weights.policy_version))
        stored = await asyncio.shield(self._stored)
        if stored.checksum != weights.checksum:
            raise VersionGone(f"the learner has gone on from version {weights.policy_version}")
        return stored

    async def _pull(self, name: str, weights: Publication) -> LoadedWeights:
        weights = await self._in_store(weights)
        version, refs = weights.policy_version, [[ref] for ref in weights.refs]
        try:
            pulled = await self.workers[name].call(
                lambda w: w.pull(version, refs), deadline_s=self._weights_deadline_s, reason=f"policy version {version}"
            )
        except RayTaskError as failed:
            if isinstance(failed.cause, ObjectLostError):
                raise RankLost(f"the rank that published version {weights.policy_version} died with it") from failed
            raise
        _refuse_others(name, pulled, weights)
        return pulled

    async def _ask(self, actor: Remote[A], ask: Callable[[A], Awaitable[R]], reason: str, *, retry: bool = False) -> R:
        deadline_s = CALL_DEADLINE_S + self._silent_s  # an actor that is stopped is killed first, and restarts
        return await actor.call(ask, deadline_s=deadline_s, reason=reason, retry=retry)


async def _end_what_is_silent(worker: Remote[Any], patience_s: float) -> None:
    """A process that is stopped before its first answer is asked without end: to Ray it starts, or is there.

    Each time it is given twice as long, for an honest start may be slow, and most that are waited for have no node.
    """
    while True:
        await asyncio.sleep(patience_s)
        log.info(f"{worker.name} did not come back, silent for {patience_s:g} s: what starts in its place is killed")
        await worker.restart()
        patience_s *= 2


def _is_gone(lost: Exception) -> bool:
    """Whether its process or its node is, and not a call of it that failed with such an error of another actor."""
    return isinstance(lost, (RayActorError, ObjectLostError)) and not isinstance(lost, RayTaskError)


def _lives(lost: Exception) -> bool:
    """Whether it is there, and could not do what it was asked for, or not in time."""
    return isinstance(lost, (RayTaskError, DeadlineExceeded)) and not isinstance(lost, RayActorError)


def _waited_for_another(lost: Exception, name: str) -> bool:
    """Whether the time ran out in which somebody else was to do something."""
    return isinstance(lost, DeadlineExceeded) and not isinstance(lost, RayTaskError) and lost.owner != name


def _publish_metrics(weights: Publication, loaded: Sequence[LoadedWeights]) -> dict[str, float]:
    """Replicas move and load at the same time, so the slowest counts."""
    return {
        "publish/gather_s": weights.seconds,
        "publish/move_s": max((one.move_s for one in loaded), default=0.0),
        "publish/load_s": max((one.load_s for one in loaded), default=0.0),
        "publish/num_bytes": weights.num_bytes,
        "publish/copies": sum(one.laid_out for one in loaded),
    }


def _refuse_others(name: str, pulled: LoadedWeights, weights: Publication) -> None:
    if pulled.checksum != weights.checksum:
        raise RStarError(
            f"{name} holds other weights than the learner published as version {weights.policy_version}: "
            f"checksum {pulled.checksum:08x} for {weights.checksum:08x}"
        )
