"""The driver's control of generation workers: starts them, sends them weights, and restarts lost ones."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from actors.balancer_service import BalancerService
from actors.cluster.gpu_lock import ANYTIME, Turn
from actors.generation.generation_actor import GenerationActor
from actors.generation.rollout_client import BLIP_PATIENCE_S, CALL_DEADLINE_S, RolloutClient
from actors.health.lost_nodes import no_node
from actors.health.watchdog import Watchdog
from actors.remote import probe_of
from actors.service import LossBudget, Service, State
from actors.weights.transfer import EngineSeat, LoadedWeights, Publication
from rstar_ray.chat.template import ChatFormat
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, LearnerError, RankLost, RStarError, last_line
from rstar_ray.run_dir.metrics import BalancerStats
from rstar_ray.telemetry.meter import NO_METER, Meter

log = logging.getLogger(__name__)

R = TypeVar("R")

POLL_S = 0.2
MAX_LOSSES_IN_A_ROW = 4
"""Most losses of one replica without progress before the run ends."""
HEALTHY_AFTER_S = 60.0
"""A replica that served this long before its loss has made progress; the start is not the cause of the loss."""
START_PATIENCE = 3.0
"""Factor on an actor's silence limit while its engine starts, because loading a library may block it."""
REPORT_WAIT_AFTER_S = 10.0
LOOK_AGAIN_S = 0.5


class Replica(Service[GenerationActor]):
    """The driver's client of one generation worker."""

    def __init__(self, handle: Any, name: str, *, start_deadline_s: float, silent_s: float) -> None:
        super().__init__(handle, name, silent_s=silent_s, start_patience=START_PATIENCE)
        self.start_deadline_s = start_deadline_s
        self.losses = LossBudget(MAX_LOSSES_IN_A_ROW)
        self.has_served = False  # in any of its processes; before, a failed start ends the run
        self.returned = False  # since a publish began; the new process lacks weights sent to the old one


class Replicas:
    """All replicas, and the rollouts that they run."""

    def __init__(
        self,
        balancer: Service[BalancerService],
        chat: ChatFormat,
        *,
        watchdog: Watchdog,
        silent_s: float,
        node_away_s: float = math.inf,
        weights_deadline_s: float = CALL_DEADLINE_S,
        journal: Path | None = None,
        several_versions: bool = False,
        meter: Meter = NO_METER,
        store_again: Callable[[int], Awaitable[Publication]] | None = None,
        turn: Turn = ANYTIME,
    ) -> None:
        """`silent_s`: how long a called actor may be silent before the watchdog restarts it. `node_away_s`: how long
        all replicas may be without a node. `weights_deadline_s`: limit for loading new weights. `journal`: folder of
        sampled turns. `several_versions`: see `RolloutClient`. `store_again`: puts the learner's weights into the
        object store, for a replica that missed a version. `turn`: context in which an engine starts, and loads weights
        after its start."""
        self._turn = turn
        self._node_away_s = node_away_s
        self._meter = meter
        self._weights_deadline_s = weights_deadline_s
        self._call_deadline_s = CALL_DEADLINE_S + silent_s  # includes killing and restarting a stopped actor
        self.workers: dict[str, Replica] = {}
        self.rollouts = RolloutClient(
            balancer,
            chat,
            on_replica_lost=self._lost,
            journal=journal,
            several_versions=several_versions,
            silent_s=silent_s,
        )
        self._balancer = balancer
        self._watchdog = watchdog
        self._starting: asyncio.Task[None] | None = None
        self._published: Publication | None = None
        self._store_again = store_again
        self._stored: asyncio.Task[Publication] | None = None  # the newest version, if it was sent but not stored
        self.publish_metrics: dict[str, float] = {}  # of the newest publish

    @property
    def available(self) -> dict[str, Replica]:
        """The replicas that are not lost, or have returned with the newest weights."""
        return {name: replica for name, replica in self.workers.items() if not replica.is_lost}

    def add(self, replica: Replica) -> None:
        """Add a replica whose engine is not started yet."""
        self.workers[replica.name] = replica

    def start(self) -> None:
        """Start every engine; `serving` waits for them. An engine that cannot start ends the run, even if nothing
        waits for it.
        """
        self._starting = asyncio.create_task(self._start_all())
        self._starting.add_done_callback(self._end_run_if_failed)

    async def serving(self) -> None:
        """Wait until at least one replica and all that are not lost serve; raises the error of one that could not
        start.
        """
        start_s = max(replica.start_deadline_s for replica in self.workers.values())
        seconds = (1 + MAX_LOSSES_IN_A_ROW) * (start_s + self._node_away_s)
        await within(self._until_serving(), seconds, waiter="driver", owner="generation", reason=self._not_serving)

    def _not_serving(self) -> str:
        return f"engines of {', '.join(sorted(self.workers.keys() - self._serving()))}"

    def _serving(self) -> set[str]:
        return {name for name, replica in self.workers.items() if replica.state is State.SERVING}

    async def _until_serving(self) -> None:
        assert self._starting is not None
        while not self._starting.done():
            if self.available and self.available.keys() <= self._serving():
                return
            await asyncio.wait({self._starting}, timeout=LOOK_AGAIN_S)
        self._starting.result()

    def _end_run_if_failed(self, starting: "asyncio.Task[None]") -> None:
        """End the run if an engine cannot start: SFT, for example, would not notice it for hours."""
        if not starting.cancelled() and isinstance(fault := starting.exception(), Exception):
            self._watchdog.end_run(fault)

    async def close(self) -> None:
        """Stop starting replicas and reading from them; the run ends their actors."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        await self.rollouts.close()

    # -- life cycle -----------------------------------------------------------------------------------------------
    async def _start_all(self) -> None:
        await asyncio.gather(*(self._start(replica) for replica in self.workers.values()))

    async def _start(self, replica: Replica) -> None:
        """Start the engine, load the current weights, then serve; repeat if the process or its engine dies."""
        while True:
            try:
                return await self._bring_up(replica)
            except (RayActorError, RayTaskError, DeadlineExceeded) as failed:
                lives = isinstance(failed, (RayTaskError, DeadlineExceeded)) and not isinstance(failed, RayActorError)
                if _waited_for_another(failed, replica.name) or (lives and not replica.has_served):
                    log.info(f"{replica.name} did not start: {last_line(failed)}")
                    raise
                await self._count_loss(replica, failed)
                await self._until_process(replica)

    async def _bring_up(self, replica: Replica) -> None:
        self._watchdog.follow(replica)
        async with self._turn():
            facts = await replica.call(lambda w: w.start(), deadline_s=replica.start_deadline_s, reason="its engine")
        await replica.connect(self._call_deadline_s, retry=False)  # gets the incarnation, which a publish needs
        await self._pull_newest(replica)
        replica.returned |= replica.is_lost
        replica.starts()
        await replica.call(lambda w: w.serve(), deadline_s=self._call_deadline_s, reason="its loops")
        replica.serves()
        replica.has_served = True
        self.rollouts.follow(replica)
        self._watchdog.follow(replica)
        log.info(f"{replica.name}: {facts.kv_capacity_tokens:,} KV tokens")

    async def _lost(self, name: str, lost: Exception) -> None:
        """Continue its rollouts elsewhere; its next process starts with the newest weights."""
        replica = self.workers[name]
        await self._count_loss(replica, lost)
        if num_kept := await self.rollouts.continue_without(name):
            log.info(f"{name}: sampled turns of {num_kept} unfinished rollouts are kept")
        await self._until_process(replica)
        await self._start(replica)

    async def _count_loss(self, replica: Replica, lost: Exception) -> None:
        """Count the loss, and kill a process that is alive but unusable. Raises `RStarError` beyond the budget, which
        is reset if rollouts have ended since the last loss, or the replica served for `HEALTHY_AFTER_S`."""
        if replica.lost() >= HEALTHY_AFTER_S:
            replica.losses.reset()
        replica.losses.count(self.rollouts.num_ended)
        self._watchdog.follow(replica)
        reason = type(lost).__name__ if _is_gone(lost) else last_line(lost)
        log.info(f"{replica.name} was lost ({reason}) and starts again")
        self._meter.add("rstar_losses_total", 1, part="replica")
        if replica.losses.exceeded:
            last = f"{reason}: {lost}" if _is_gone(lost) else reason
            raise RStarError(
                f"{replica.name} was lost {replica.losses.in_a_row} times without a rollout that ended in between, or "
                f"{HEALTHY_AFTER_S:g} s of serving, the last time by {last}"
            )
        if not _is_gone(lost):
            await replica.restart()

    async def _until_process(self, replica: Replica) -> None:
        """Wait for the next process, which Ray starts once its bundle has a node; without a limit while others serve.

        The watchdog kills a process that does not answer. Raises `RStarError` if no replica serves for `node_away_s`.
        """
        up = asyncio.ensure_future(replica.until_answered(probe_of))
        reporting = asyncio.get_running_loop().call_later(REPORT_WAIT_AFTER_S, self._report_wait, replica.name)
        reason = f"a node for {replica.name}"
        try:
            while not up.done():
                if self.available:  # the run does not need this one
                    await asyncio.wait({up}, timeout=LOOK_AGAIN_S)
                else:
                    any_up = self._until_up_or_another(up)
                    await within(any_up, self._node_away_s, waiter="driver", owner="Ray", reason=reason)
            await up
            replica.returns()
        except DeadlineExceeded as late:
            raise no_node(replica.name, self._node_away_s) from late
        finally:
            reporting.cancel()
            up.cancel()

    async def _until_up_or_another(self, up: "asyncio.Future[Any]") -> None:
        while not self.available and not up.done():
            await asyncio.wait({up}, timeout=LOOK_AGAIN_S)

    def _report_wait(self, name: str) -> None:
        serving = self._serving()
        log.info(f"{name} waits for its process, or a node: {len(serving)} of {len(self.workers)} replicas serve")

    # -- weights --------------------------------------------------------------------------------------------------
    def seats(self, senders: Mapping[int, int], *, ranks: int) -> list[EngineSeat]:
        """The replicas that can receive weights. `senders`: sending rank by replica number; `ranks`: of one engine."""
        for replica in self.workers.values():
            replica.returned = False
        return [
            EngineSeat(name=name, incarnation=replica.incarnation, ranks=ranks, sender=senders[number])
            for number, (name, replica) in enumerate(self.workers.items())
            if number in senders and not replica.is_lost
        ]

    async def sleep(self) -> None:
        """Make every engine free its GPU memory for the learner, until the next weights arrive; also the engines of
        replicas that return and have not loaded weights yet."""
        up = [replica for replica in self.workers.values() if replica.state is not State.LOST]
        await asyncio.gather(*(self._sleep_unless_lost(replica) for replica in up))

    async def _sleep_unless_lost(self, replica: Replica) -> None:
        """Restart a replica that does not sleep, because an update would not fit into the memory that it leaves."""
        try:
            await replica.call(lambda w: w.sleep(), deadline_s=self._weights_deadline_s, reason="its GPU's memory")
        except (RayTaskError, DeadlineExceeded) as failed:  # before the next: an error may be both
            log.info(f"{replica.name} did not sleep: {last_line(failed)}")
            await replica.restart()
        except RayActorError as lost:
            log.info(f"{replica.name} did not sleep: {type(lost).__name__}")

    async def publish(self, weights: Publication) -> None:
        """Make every replica that is up serve these weights; returns when all do. `weights.took` have loaded them."""
        self._published, self._stored = weights, None
        version = weights.policy_version
        self.rollouts.serves(version, weights.checksum)
        for name, reason in weights.failed.items():
            log.info(f"{name} did not take version {version} by {weights.way}: {reason}")
        for name, pulled in weights.took.items():
            _refuse_others(name, pulled, weights)
        missed = [replica for name, replica in self.available.items() if name not in weights.took or replica.returned]
        pulled = await asyncio.gather(*(self._pull_unless_lost(replica, weights) for replica in missed))
        took = [*weights.took.values(), *(one for one in pulled if one is not None)]
        self.publish_metrics = _publish_metrics(weights, took)
        await self.rollouts.save_learned()  # before the balancer discounts it for the new version
        await self._ask(lambda b: b.set_policy_version(version), "the policy version")
        await self.rollouts.save_learned()  # with the finished step

    async def balancer_stats(self) -> BalancerStats:
        """The balancer's statistics since the last call."""
        return await self._ask(lambda b: b.step_figures(), "the step's figures")

    async def _ask(self, ask: Callable[[BalancerService], Awaitable[R]], reason: str) -> R:
        return await self._balancer.call(ask, deadline_s=self._call_deadline_s, reason=reason, retry=True)

    async def _pull_unless_lost(self, replica: Replica, weights: Publication) -> LoadedWeights | None:
        """Load the weights on one replica; None if it was lost, or cannot load them and is restarted. A lost replica
        loads the newest weights when it returns. One that could not be reached for a moment loads them before it
        samples again."""
        name, version = replica.name, weights.policy_version
        while True:
            try:
                return await self._pull(replica, weights)
            except (RayTaskError, DeadlineExceeded) as failed:  # before the next: an error may be both
                if _waited_for_another(failed, name):
                    raise
                log.info(f"{name} did not take version {version}: {last_line(failed)}")
                await replica.restart()
                return None
            except RayActorError as lost:
                same = self._is_same_process(replica)
                if not await within(same, self._weights_deadline_s, waiter="driver", owner=name, reason="a heartbeat"):
                    log.info(f"{name} did not take version {version}: {type(lost).__name__}")
                    return None
                log.info(f"{name} answers again after {type(lost).__name__}: sending the weights again")

    async def _is_same_process(self, replica: Replica) -> bool:
        """Wait until the replica answers or is lost, because until then it may serve old weights."""
        while not replica.is_lost:
            if (found := await replica.probe(BLIP_PATIENCE_S)) is not None:
                return found.incarnation == replica.incarnation
            await asyncio.sleep(POLL_S)
        return False

    async def _pull_newest(self, replica: Replica) -> None:
        """Load the newest weights; if the rank that published them has died, wait for those after its restart."""
        pulled: Publication | None = None
        while self._published is not None and pulled is not self._published:
            pulled = self._published
            try:
                async with self._turn():  # a load wakes a sleeping engine, so no update may run beside it
                    await self._pull(replica, pulled)
            except LearnerError:
                newer, reason = self._published_after(pulled), "weights after its restart"
                await within(newer, replica.start_deadline_s, waiter=replica.name, owner="learner", reason=reason)

    async def _published_after(self, weights: Publication) -> None:
        while self._published is weights:
            await asyncio.sleep(POLL_S)

    async def _in_store(self, weights: Publication) -> Publication:
        """The same weights in the object store; the learner stores them at the first request.

        Raises `VersionGone` if the learner has trained since.
        """
        if weights.refs or self._store_again is None:
            return weights
        if self._stored is None:
            log.info(f"version {weights.policy_version} goes through the object store for replicas that missed it")
            self._stored = asyncio.ensure_future(self._store_again(weights.policy_version))
        return await asyncio.shield(self._stored)

    async def _pull(self, replica: Replica, weights: Publication) -> LoadedWeights:
        version, stored = weights.policy_version, await self._in_store(weights)
        refs = [[ref] for ref in stored.refs]
        try:
            pulled = await replica.call(
                lambda w: w.pull(version, refs), deadline_s=self._weights_deadline_s, reason=f"policy version {version}"
            )
        except RayTaskError as failed:
            if isinstance(failed.cause, ObjectLostError):
                raise RankLost(f"version {version} was lost with the rank that published it") from failed
            raise
        _refuse_others(replica.name, pulled, weights)
        return pulled


def _is_gone(lost: Exception) -> bool:
    """Whether the actor's process or node was lost, not another actor that it called."""
    return isinstance(lost, (RayActorError, ObjectLostError)) and not isinstance(lost, RayTaskError)


def _waited_for_another(lost: Exception, name: str) -> bool:
    """Whether another actor missed the deadline."""
    return isinstance(lost, DeadlineExceeded) and not isinstance(lost, RayTaskError) and lost.owner != name


def _publish_metrics(weights: Publication, loaded: Sequence[LoadedWeights]) -> dict[str, float]:
    """Metrics of a publish; replicas work in parallel, so the slowest one counts."""
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
            f"{name} loaded weights that differ from version {weights.policy_version} of the learner: "
            f"checksum {pulled.checksum:08x} for {weights.checksum:08x}"
        )
