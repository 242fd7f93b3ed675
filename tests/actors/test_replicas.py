"""The generation workers as the driver holds them, with fakes in place of workers and balancer; no Ray."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError, ObjectLostError, OwnerDiedError, RayTaskError

from actors import remote
from actors.balancer_service import Known
from actors.cluster.gpu_lock import GpuTurns
from actors.generation import replicas, rollout_client, weight_swap
from actors.generation.engine import EngineFacts
from actors.generation.outbox import NUM_PARTS, Ended
from actors.generation.replicas import MAX_LOSSES_IN_A_ROW, Replica, Replicas
from actors.health import watchdog
from actors.health.heartbeat import Heartbeat
from actors.health.watchdog import Watchdog
from actors.learner.gang import Learner
from actors.remote import Batch
from actors.service import Service, State
from actors.system import TrainingActors
from actors.weights.transfer import LoadedWeights, Publication
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.config import DetectorConfig, with_values
from rstar_ray.deadline import waits
from rstar_ray.errors import DeadlineExceeded, EngineError, RankLost, RStarError, VersionGone
from scheduler.expected_kv.learned import Learned, MoveCounts
from tests import derived
from tests.actors.test_weight_swap import Seated
from tests.fakes import CharChat, adding_problems, request
from tests.logged import Logged

FIRST, SECOND = (
    Publication(policy_version=version, refs=("a ref",), checksum=10 + version, num_bytes=1, seconds=0.25)
    for version in (1, 2)
)


class Method:
    """A method as an actor's handle has it."""

    def __init__(self, function: Any) -> None:
        self.remote = function

    def options(self, **_: Any) -> "Method":
        return self


class Worker:
    """Takes weights and says nothing; ends when killed, and can then be started again, as by Ray."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.checksums = {1: 11, 2: 12}
        self.hold = asyncio.Event()  # its next start waits for this
        self.hold.set()
        self.hold_pull = asyncio.Event()
        self.hold_pull.set()
        self.hold_serve = asyncio.Event()  # its loops wait for this
        self.hold_serve.set()
        self._killed = asyncio.Event()
        self._lives = 1
        self.node = asyncio.Event()  # it is started again once this is set
        self.node.set()
        self._restart: asyncio.Task[None] | None = None
        self.load_s, self.laid_out = 0.2, True
        self.cut = False  # calls fail, and it lives on
        self.mute = False  # so do probes, and what it has finished still comes
        self.stopped = False  # before its first answer, until it is killed
        self.answer_lost = False  # with its node
        self.no_start = 0  # so often its engine does not come up
        self.fault_in_serve: Exception | None = None
        self.fault: Exception | None = None  # what its next call raises, or a background loop has met
        self.lost: set[int] = set()  # versions whose publisher is gone
        self.probe = Method(self._probe)
        self.start, self.serve = Method(self._start), Method(self._serve)
        self.pull, self.take_finished = Method(self._pull), Method(self._take_finished)
        self.sleep = Method(self._sleep)

    async def _start(self) -> EngineFacts:
        going = [asyncio.ensure_future(event.wait()) for event in (self.hold, self._killed)]
        await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
        for each in going:
            each.cancel()
        if self._killed.is_set():
            raise ActorUnavailableError("it restarts", None)
        self.calls.append("start")
        if self.no_start:
            self.no_start -= 1
            failed = EngineError("its engine process was killed")
            raise RayTaskError("start", f"Traceback\nEngineError: {failed}", failed).as_instanceof_cause()
        return EngineFacts(kv_capacity_tokens=1_000, block_size=32, max_model_len=100)

    async def _serve(self) -> None:
        self.calls.append("serve")
        await self.hold_serve.wait()
        fault, self.fault_in_serve = self.fault_in_serve, None
        if fault is not None:
            raise fault

    async def _sleep(self) -> None:
        if self._killed.is_set():
            raise ActorUnavailableError("it restarts", None)
        if self.fault is not None:
            raise self._met()
        self.calls.append("sleeps")

    async def _pull(self, version: int, refs: Any) -> LoadedWeights:
        await self.hold_pull.wait()
        if self.cut or self._killed.is_set():
            self.cut = False
            raise ActorUnavailableError("it restarts", None)
        if self.fault is not None:
            raise self._met()
        if version in self.lost:
            raise RayTaskError("pull", "", OwnerDiedError("ref", None, ""))
        assert refs == [["a ref"]]  # boxed, so that Ray hands on the ref itself
        self.calls.append(version)
        return LoadedWeights(checksum=self.checksums[version], move_s=0.1, load_s=self.load_s, laid_out=self.laid_out)

    async def _probe(self) -> Heartbeat:
        if self._killed.is_set() or self.mute:
            raise ActorUnavailableError("it restarts", None)
        while self.stopped:
            await asyncio.sleep(0.01)
        return Heartbeat(incarnation=str(self._lives), node_id="node", pid=1, start_time="then")

    def _take_finished(self, wait_s: float, acknowledged: int) -> list[Any]:
        return [self._until_killed(), *["a ref"] * NUM_PARTS]

    async def _until_killed(self) -> Batch[Ended]:
        await self._killed.wait()
        if self.fault is not None:
            self._killed.clear()
            raise self._met()
        if self.answer_lost:
            raise ObjectLostError("ref", None, "")
        raise ActorUnavailableError("it restarts", None)

    def _met(self) -> Exception:
        assert self.fault is not None
        fault, self.fault = self.fault, None
        return RayTaskError("a call", "Traceback\n" + repr(fault), fault).as_instanceof_cause()

    def fail(self, fault: Exception) -> None:
        """Its loops end with this; its process lives."""
        self.fault = fault
        self._killed.set()

    def kill(self) -> None:
        self._killed.set()
        self._restart = asyncio.create_task(self._start_again())

    async def _start_again(self) -> None:
        await asyncio.sleep(0.05)
        await self.node.wait()
        self._killed.clear()
        self._lives += 1


def learned_by(admissions: int) -> Learned:
    """After so many rollouts."""
    moves = MoveCounts(generated_tokens=0, turns=0, moved_tokens=0, preempted_tokens=0)
    return Learned(lengths=(), admissions=admissions, moves=moves)


class Balancer:
    """Remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.changed = asyncio.Event()
        self.submit = Method(self._submit)
        self.replica_lost, self.set_policy_version = Method(self._replica_lost), Method(self._tell)
        self.held_by_lost, self.missing = Method(self._held_by_lost), Method(self._missing)
        self.return_rollouts = Method(self._return_rollouts)
        self.learned, self.load_learned = Method(self._learned), Method(self._load_learned)
        self.process = "first"
        self.knows: Learned | None = learned_by(0)
        self.held: dict[str, list[str]] = {}  # by replica
        self.returned: list[list[RolloutState]] = []  # message by message

    async def _learned(self) -> Known:
        return Known(incarnation=self.process, learned=self.knows)

    async def _load_learned(self, learned: Learned) -> Known:
        self.knows = learned
        return await self._learned()

    async def _submit(self, items: Any) -> None:
        await self._tell(len(items))

    async def _held_by_lost(self, replica_id: str, unfinished: list[str]) -> list[str]:
        return self.held.get(replica_id, [])

    async def _replica_lost(self, replica_id: str) -> list[str]:
        await self._tell(replica_id)
        return []

    async def _missing(self, rollout_ids: list[str]) -> list[str]:
        return []

    async def _return_rollouts(self, replica_id: str, items: Any) -> None:
        self.returned.append([state for _, state in items])

    async def _tell(self, what: Any) -> None:
        self.calls.append(what)
        self.changed.set()

    async def hears(self, what: Any, times: int = 1) -> None:
        async with asyncio.timeout(60):
            while self.calls.count(what) < times:
                self.changed.clear()
                await self.changed.wait()


CONFIG = DetectorConfig(probe_every_s=0.1, silent_s=0.4, learner_silent_s=0.4, engine_step_s=0.4, still_s=60)


class Run:
    """Two replicas under a watchdog."""

    def __init__(self, logged: Logged, silent_s: float = 10.0) -> None:
        self.balancer = Balancer()
        self.shown = logged
        logged.listeners.append(lambda line: self.line_shown.set())
        self.line_shown = asyncio.Event()
        self.watchdog = Watchdog(CONFIG)
        self.watchdog.start()
        self.replicas = Replicas(
            Service(self.balancer, "balancer"),
            CharChat(),
            watchdog=self.watchdog,
            silent_s=10,
            node_away_s=0.3,
        )
        self.first, self.second = Worker(), Worker()
        for name, worker in (("generation/0", self.first), ("generation/1", self.second)):
            self.replicas.add(Replica(worker, name, start_deadline_s=5, silent_s=silent_s))

    async def close(self) -> None:
        await self.replicas.close()
        await self.watchdog.close()

    async def shows(self, line: str, times: int = 1) -> None:
        async with asyncio.timeout(60):
            while self.shown.count(line) < times:
                self.line_shown.clear()
                await self.line_shown.wait()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replicas, rollout_client):
        monkeypatch.setattr(module, "BLIP_PATIENCE_S", 0.01)
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.005)
    monkeypatch.setattr(replicas, "LOOK_AGAIN_S", 0.01)


@pytest.fixture(autouse=True)
async def killed_like_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    def kill(worker: Worker, *, no_restart: bool) -> None:
        assert not no_restart
        worker.calls.append("killed")
        loop.call_soon_threadsafe(worker.kill)

    monkeypatch.setattr(remote.ray, "kill", kill)


@pytest.fixture
async def idle(logged: Logged, request: pytest.FixtureRequest) -> AsyncIterator[Run]:
    """Not started; a replica may be silent for the test's parameter, if it has one."""
    made = Run(logged, getattr(request, "param", 10.0))
    yield made
    await made.close()


@pytest.fixture
async def run(idle: Run) -> Run:
    idle.replicas.start()
    await idle.replicas.serving()
    return idle


@pytest.mark.parametrize("idle", [1.0], indirect=True)
async def test_a_process_that_is_stopped_before_its_first_answer_is_killed_and_the_next_one_serves(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    """Others serve, so nothing else waits for it."""
    monkeypatch.setattr(watchdog, "RESTART_S", 0.1)
    run.second.stopped = True
    run.second.kill()
    while "killed" not in run.second.calls:
        await asyncio.sleep(0.01)
    assert any(line.startswith("generation/1 did not come back, silent for 1.") for line in run.shown)
    run.second.stopped = False  # it was that process
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == ["start", "serve", "killed", "start", "serve"]


@pytest.mark.parametrize("idle", [0.5], indirect=True)
async def test_a_returning_process_that_is_stopped_after_its_first_answer_is_killed_as_soon_as_in_a_first_start(
    run: Run,
):
    run.second.hold.clear()
    run.second.kill()
    async with asyncio.timeout(60):
        while run.replicas.workers["generation/1"].state is not State.RETURNING:
            await asyncio.sleep(0)
        run.second.stopped = True
        while "killed" not in run.second.calls:
            await asyncio.sleep(0.01)
    assert any(line.startswith("generation/1 was silent for") and "(limit 1.5 s)" in line for line in run.shown)
    run.second.stopped = False
    run.second.hold.set()
    await run.shows("generation/1: 1,000 KV tokens", times=2)


@pytest.mark.parametrize("idle", [0.5], indirect=True)
async def test_a_process_that_is_silent_in_its_start_is_killed_later_than_one_that_serves(idle: Run):
    idle.second.hold.clear()
    idle.replicas.start()
    await idle.shows("generation/0: 1,000 KV tokens")
    await asyncio.sleep(0.3)  # it has answered
    idle.second.stopped = True
    while "killed" not in idle.second.calls:
        await asyncio.sleep(0.01)
    assert any(line.startswith("generation/1 was silent for") and "(limit 1.5 s)" in line for line in idle.shown)
    idle.second.stopped = False
    idle.second.hold.set()
    await idle.replicas.serving()
    assert "generation/1 was lost (ActorUnavailableError) and starts again" in idle.shown
    await idle.shows("generation/1: 1,000 KV tokens")


async def test_a_balancer_that_restarted_empty_gets_what_was_known_when_the_newest_version_was_published(run: Run):
    for version, admissions in ((FIRST, 40), (SECOND, 80)):
        run.balancer.knows = learned_by(admissions)
        await run.replicas.publish(version)
    run.balancer.process, run.balancer.knows = "reborn", learned_by(3)
    assert (
        await run.replicas.rollouts.learned() == learned_by(80).as_json()
    )  # for a checkpoint that is written before it is noticed
    assert run.balancer.knows == learned_by(80)


async def test_a_publish_does_not_end_with_a_balancer_that_cannot_say_what_it_has_learned(run: Run):
    run.balancer.knows = None
    await run.replicas.publish(FIRST)  # its rule learns nothing
    assert await run.replicas.rollouts.learned() is None

    async def fail() -> Known:
        raise RuntimeError("no such call")

    run.balancer.learned = Method(fail)
    await run.replicas.publish(SECOND)
    assert run.shown[-1] == "the balancer's learned state is skipped: RuntimeError: no such call"


async def test_a_lost_worker_takes_the_newest_weights_before_it_serves(run: Run):
    await run.replicas.publish(FIRST)
    run.second.hold.clear()
    run.second.kill()
    await run.balancer.hears("generation/1")  # its rollouts continue elsewhere
    assert run.replicas.available.keys() == {"generation/0"}
    await run.replicas.publish(SECOND)  # without waiting for it
    assert run.first.calls == ["start", "serve", 1, 2]
    run.second.hold.set()
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == ["start", "serve", 1, "start", 2, "serve"]
    assert run.replicas.available.keys() == {"generation/0", "generation/1"}


async def test_a_worker_that_dies_in_a_publish_does_not_end_it(run: Run):
    run.second.hold.clear()
    run.second.kill()
    await run.replicas.publish(FIRST)
    assert "generation/1 did not take version 1: ActorUnavailableError" in run.shown
    run.second.hold.set()
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == ["start", "serve", "start", 1, "serve"]


async def test_a_worker_that_could_not_be_reached_for_a_moment_takes_the_weights_before_the_publish_ends(run: Run):
    run.second.cut = True
    await run.replicas.publish(FIRST)
    assert run.second.calls == ["start", "serve", 1]  # and it was not started again
    assert "generation/1 answers again after ActorUnavailableError: sending the weights again" in run.shown
    assert run.balancer.calls == [1]


async def test_an_engine_that_does_not_come_up_is_started_again_where_it_has_served_before(run: Run):
    await run.replicas.publish(FIRST)
    run.second.no_start = 2
    run.second.kill()
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == ["start", "serve", 1, *["start", "killed"] * 2, "start", 1, "serve"]
    assert run.shown.count("generation/1 was lost (EngineError: its engine process was killed) and starts again") == 2


async def test_an_engine_that_hangs_in_its_start_is_killed_where_it_has_served_before(run: Run):
    await run.replicas.publish(FIRST)
    run.replicas.workers["generation/1"].start_deadline_s = 0.1
    run.second.hold.clear()
    run.second.kill()
    await run.shows(
        "generation/1 was lost (driver waited 0.1 s for generation/1 (its engine) and gave up) and starts again"
    )
    run.second.hold.set()
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == ["start", "serve", 1, "killed", "start", 1, "serve"]


async def test_a_worker_that_hangs_before_it_serves_again_is_killed_and_comes_back(run: Run):
    await run.replicas.publish(FIRST)
    run.second.fault_in_serve = DeadlineExceeded("driver", "generation/1", "its loops", 130)
    run.second.kill()
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == ["start", "serve", 1, "start", 1, "serve", "killed", "start", 1, "serve"]


@pytest.mark.parametrize(
    "waits_for_it",
    [lambda run: run.replicas.serving(), lambda run: run.watchdog.guard(asyncio.Event().wait())],
    ids=["the rollouts", "nobody yet, as in fine-tuning before the first publish"],
)
async def test_an_engine_that_has_never_come_up_ends_the_run_at_once(idle: Run, waits_for_it: Any):
    idle.second.no_start = 1
    idle.replicas.start()
    with pytest.raises(EngineError):
        await asyncio.wait_for(waits_for_it(idle), 60)
    assert idle.second.calls == ["start"]
    assert "generation/1 did not start: EngineError: its engine process was killed" in idle.shown


async def test_a_node_that_is_lost_in_a_first_start_does_not_hold_up_the_replicas_that_serve(
    monkeypatch: pytest.MonkeyPatch, idle: Run
):
    monkeypatch.setattr(replicas, "REPORT_WAIT_AFTER_S", 0.05)
    idle.second.hold.clear()
    idle.replicas.start()
    await idle.shows("generation/0: 1,000 KV tokens")
    serving = asyncio.ensure_future(idle.replicas.serving())
    await asyncio.sleep(0.05)
    assert not serving.done()
    assert "driver has waited 0 s for generation (engines of generation/1)" in [
        wait.line(wait.since_s) for wait in waits._open.values()
    ]
    idle.second.node.clear()
    idle.second.kill()
    await asyncio.wait_for(serving, 60)
    await idle.shows("generation/1 waits for its process, or a node: 1 of 2 replicas serve")
    await idle.replicas.publish(FIRST)
    idle.second.hold.set()
    idle.second.node.set()
    await idle.shows("generation/1: 1,000 KV tokens")
    assert idle.second.calls == ["start", 1, "serve"]


async def test_nodes_that_are_lost_in_a_first_start_and_do_not_return_end_the_run_by_a_named_wait(idle: Run):
    for worker in (idle.first, idle.second):
        worker.hold.clear()
        worker.node.clear()
    idle.replicas.start()
    await asyncio.sleep(0)
    for worker in (idle.first, idle.second):
        worker.kill()
    await asyncio.sleep(0.1)
    assert "driver has waited 0 s for Ray (a node for generation/1)" in [
        wait.line(wait.since_s) for wait in waits._open.values()
    ]
    with pytest.raises(RStarError, match=r"had no node for 0\.3 s \(--detector\.node-away-s\): their node was lost"):
        await asyncio.wait_for(idle.replicas.serving(), 60)
    with pytest.raises(RStarError):
        await idle.watchdog.guard(asyncio.Event().wait())


@pytest.mark.parametrize(
    "fault",
    [
        DeadlineExceeded("generation/1", "balancer", "grants", 80),
        MemoryError("no room"),
        ActorUnavailableError("the balancer, as it saw it", None),
    ],
    ids=lambda fault: type(fault).__name__,
)
async def test_a_worker_whose_loops_have_failed_is_killed_and_comes_back(run: Run, fault: Exception):
    await run.replicas.publish(FIRST)
    run.second.fail(fault)
    await run.balancer.hears("generation/1")
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == ["start", "serve", 1, "killed", "start", 1, "serve"]
    said = next(line for line in run.shown if "was lost" in line)
    assert said.startswith("generation/1 was lost (") and said.endswith("and starts again")
    assert type(fault).__name__ in said


async def test_a_worker_that_cannot_take_the_weights_is_started_again_and_takes_them_then(run: Run):
    run.second.fault = MemoryError("no room")
    await run.replicas.publish(FIRST)
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert any("generation/1 did not take version 1: " in line and "MemoryError" in line for line in run.shown)
    assert run.second.calls == ["start", "serve", "killed", "start", 1, "serve"]


async def test_engines_sleep_for_an_update_and_one_that_cannot_is_started_again(run: Run):
    await run.replicas.publish(FIRST)
    run.second.fault = MemoryError("memory usage increased after sleeping")
    await run.replicas.sleep()
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.first.calls == ["start", "serve", 1, "sleeps"]
    assert run.second.calls == ["start", "serve", 1, "killed", "start", 1, "serve"]
    assert any("generation/1 did not sleep: " in line and "MemoryError" in line for line in run.shown)


async def test_an_engine_that_returns_before_an_update_sleeps_and_loads_weights_after_it(run: Run):
    turns = GpuTurns(start_deadline_s=60, step_deadline_s=60)
    run.replicas._turn = turns.engine
    await run.replicas.publish(FIRST)
    run.second.hold.clear()
    run.second.kill()
    await run.balancer.hears("generation/1")
    async with asyncio.timeout(60):
        while run.replicas.workers["generation/1"].state is not State.RETURNING:
            await asyncio.sleep(0.01)
    asyncio.get_running_loop().call_later(0.05, run.second.hold.set)
    async with turns.learner():
        await run.replicas.sleep()
        await asyncio.sleep(0.1)
        assert run.first.calls == ["start", "serve", 1, "sleeps"]
        during = list(run.second.calls)
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == [*during, 1, "serve"]
    assert during == ["start", "serve", 1, "start", "sleeps"]


class Ranks:
    """A rank of the learner, which says when it updates."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    async def call_once(self, ask: Any, *, deadline_s: float, reason: str) -> Any:
        if reason == "the weights":
            return FIRST
        self._calls.append("updates")
        return UpdateResult(applied=True, reason="", step=1, metrics={})


async def test_the_driver_has_engines_sleep_before_an_update_and_its_publish_wakes_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    """Whose memory is awake is vLLM's to say: a fake of it stands in each worker."""
    monkeypatch.setattr(weight_swap, "refuse_other_parameters", lambda *_: None)
    engines = [Seated(0), Seated(1)]
    for worker, engine in zip((run.first, run.second), engines, strict=True):

        async def pull(version: int, refs: Any, engine: Seated = engine) -> LoadedWeights:
            await engine.swap.begin(version, ())
            await engine.swap.take({})
            return replace(await engine.swap.end(), checksum=FIRST.checksum)

        worker.sleep, worker.pull = Method(engine.swap.sleep), Method(pull)
    halves = {"engine.gpus_per_replica": 0.5, "learner.gpus_per_rank": 0.5, "engine.sleep": True}
    config = with_values(derived.learner(), {**halves, "learner.weights_by": "object_store"})
    actors = TrainingActors(config, Path("model"), chat=cast(Any, CharChat()))
    actors._replicas = run.replicas
    actors._learner = learner = Learner(config, Path("model"), turn=actors._learner_turn)
    learner._facts = SimpleNamespace(attention_tokens=math.inf)
    calls = engines[0].vllm.calls
    learner._ranks = [cast(Any, Ranks(calls))]
    example = SftExample(np.arange(3, dtype=np.int32), np.ones(3, np.bool_))
    await actors.publish(1)
    for _ in range(2):
        calls.clear()
        await learner.train_sft([example], 1e-3)
        await learner.train_sft([example], 1e-3)
        await actors.publish(1)  # the engines have dropped this version
        woken = ["wakes ['weights']", "loaded", "wakes ['kv_cache']", "resumes"]
        assert calls == ["sleeps at 2", "updates", "updates", *woken]
    assert [engine.vllm.dead for engine in engines] == ["", ""]


async def test_weights_whose_publisher_died_are_a_loss_of_the_learner_and_who_comes_back_waits_for_the_next(run: Run):
    await run.replicas.publish(FIRST)
    run.second.lost = {1}
    run.second.kill()
    await run.balancer.hears("generation/1")
    run.first.lost = {2}
    with pytest.raises(RankLost, match="version 2 was lost with the rank that published it"):
        await run.replicas.publish(SECOND)
    run.first.lost = run.second.lost = set()
    await run.replicas.publish(SECOND)
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls[-2:] == [2, "serve"]


SENT = replace(
    FIRST,
    refs=(),
    way="ipc",
    took={"generation/0": LoadedWeights(checksum=11, move_s=0.0, load_s=0.7, laid_out=False)},
    failed={"generation/1": "its process died"},
)
"""A version that one of two took from a rank, and that lies nowhere."""


async def test_who_took_a_version_died_and_is_back_before_the_publish_ends_takes_it_again(run: Run):
    async def store_again(version: int) -> Publication:
        return SECOND

    run.replicas._store_again = store_again
    await run.replicas.publish(FIRST)
    assert len(run.replicas.seats({0: 0, 1: 0}, ranks=1)) == 2
    run.second.kill()  # it has what it was sent, and the learner still sends to others
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls[-3:] == ["start", 1, "serve"]
    took = {name: LoadedWeights(checksum=12, move_s=0.0, load_s=0.7, laid_out=False) for name in run.replicas.workers}
    await run.replicas.publish(replace(SECOND, refs=(), way="nccl", took=took))
    assert (run.first.calls[-1], run.second.calls[-1]) == (1, 2)


async def test_a_worker_that_comes_back_once_the_learner_has_continued_waits_for_the_next_version(run: Run):
    async def store_again(version: int) -> Publication:
        raise VersionGone("the learner has trained since")

    run.replicas._store_again = store_again
    both = dict.fromkeys(("generation/0", "generation/1"), SENT.took["generation/0"])
    await run.replicas.publish(replace(SENT, took=both, failed={}))
    run.second.kill()
    await run.balancer.hears("generation/1")
    await run.shows("version 1 goes through the object store for replicas that missed it")
    await run.replicas.publish(SECOND)
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert run.second.calls == ["start", "serve", "start", 2, "serve"]


async def test_a_sent_version_that_is_another_than_the_learners_ends_the_run(run: Run):
    wrong = {"generation/0": LoadedWeights(checksum=99, move_s=0.0, load_s=0.7, laid_out=False)}
    with pytest.raises(RStarError, match="generation/0 loaded weights that differ from version 1 of the learner"):
        await run.replicas.publish(replace(SENT, took=wrong))


@pytest.mark.parametrize("named", [False, True])
async def test_losses_without_a_rollout_that_ends_in_between_end_the_run_through_its_rollouts(run: Run, named: bool):
    def lose() -> None:
        if named:
            run.second.fail(EngineError("no step for 300 s"))
        else:
            run.second.kill()

    rollouts = run.replicas.rollouts.run([request(problem) for problem in adding_problems(1)])
    first = asyncio.ensure_future(anext(rollouts))
    for time in range(MAX_LOSSES_IN_A_ROW):
        lose()
        await run.shows("generation/1: 1,000 KV tokens", times=2 + time)
    lose()
    last = "no step for 300 s" if named else "ActorUnavailableError: .* it restarts"
    with pytest.raises(RStarError, match=f"lost {MAX_LOSSES_IN_A_ROW + 1} times without a rollout.*{last}"):
        await asyncio.wait_for(first, 60)


async def test_a_node_that_takes_many_replicas_at_once_is_not_a_row_of_losses(run: Run):
    for time in range(MAX_LOSSES_IN_A_ROW):
        run.first.kill()
        run.second.kill()
        for name in ("generation/0", "generation/1"):
            await run.shows(f"{name}: 1,000 KV tokens", times=2 + time)
    assert run.replicas.available.keys() == {"generation/0", "generation/1"}


async def test_replicas_of_which_none_has_a_node_end_the_run_through_its_rollouts(run: Run):
    rollouts = run.replicas.rollouts.run([request(problem) for problem in adding_problems(1)])
    first = asyncio.ensure_future(anext(rollouts))
    for worker in (run.first, run.second):
        worker.node.clear()
        worker.kill()
    with pytest.raises(RStarError, match=r"had no node for 0\.3 s \(--detector\.node-away-s\): their node was lost"):
        await asyncio.wait_for(first, 60)


async def test_an_answer_that_was_on_a_lost_node_is_the_loss_of_its_replica(run: Run):
    run.second.answer_lost = True
    run.second.kill()
    await run.balancer.hears("generation/1")
    await run.shows("generation/1: 1,000 KV tokens", times=2)
    assert "generation/1 was lost (ObjectLostError) and starts again" in run.shown
