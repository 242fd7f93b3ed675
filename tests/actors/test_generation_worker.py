"""The worker with fakes in place of engine, balancer and sandbox; no Ray."""

# pyright: reportPrivateUsage=false

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from ray.exceptions import ActorUnavailableError

from actors.balancer_service import BalancerService
from actors.generation.engine import EngineFacts
from actors.generation.outbox import JournalWriter, rollout_load
from actors.generation.worker import GenerationWorker
from actors.weights.transfer import LoadedWeights
from rstar_ray.agent.journal import TurnJournal, journaled
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.errors import EngineError, JudgeError, ToolError, ToolStateLost
from rstar_ray.reward.judge import Judgement
from rstar_ray.rollouts import DroppedRollout
from rstar_ray.tools.environment import Reply
from rstar_ray.trajectory import (
    Completion,
    Problem,
    RolloutRequest,
    StopReason,
    ToolCall,
    ToolMemory,
    ToolResult,
    Trajectory,
    TrajectorySummary,
)
from scheduler.records import Move, Quarantined, Registration, ReplicaLoad, TurnReport, UnknownReplica
from tests.fakes import (
    LIMITS,
    AddingSandbox,
    CharChat,
    Local,
    OpenTools,
    PlainTools,
    SkilledPolicy,
    UnreliableSandbox,
    adding_problems,
    as_completion,
    call,
    drained,
    request,
    same_text,
)

CHAT = CharChat()


class WorkerChat(CharChat):
    """A worker's: prompts come encoded, so it has nothing to do with them."""

    def prompt_ids(self, problem: Problem) -> list[int]:
        raise AssertionError(f"{problem.id} was encoded again")


@dataclass
class FakeEngine:
    """`SkilledPolicy` with the surface of an engine; dies after `lives` completions."""

    policy: SkilledPolicy = field(default_factory=SkilledPolicy)
    lives: int = 10**9
    policy_version: int = 0
    died: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> EngineFacts:
        return EngineFacts(kv_capacity_tokens=100_000, block_size=16, max_model_len=1_000)

    async def until_dead(self) -> None:
        await self.died.wait()
        raise EngineError("the engine does not serve: its process was killed")

    async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
        self.lives -= 1
        if self.lives < 0:
            raise EngineError("the engine died")
        return await self.policy(prompt_ids, **asked)

    async def update_weights(self, version: int, buckets: Sequence[Any], name: str) -> LoadedWeights:
        self.policy_version = self.policy.policy_version = version
        return LoadedWeights(checksum=7)

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(policy_version=self.policy_version)

    async def close(self) -> None: ...


@dataclass
class HeldEngine(FakeEngine):
    """Ends no completion until released."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    held: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
        self.held += 1
        self.changed.set()
        await self.go.wait()
        return await super().generate(prompt_ids, **asked)

    async def holds(self, count: int) -> None:
        """Wait until so many are held."""
        async with asyncio.timeout(60):
            while self.held < count:
                self.changed.clear()
                await self.changed.wait()


def worker(balancer: BalancerService, name: str = "generation/0", **parts: Any) -> GenerationWorker:
    settings: dict[str, Any] = {"engine": FakeEngine(), "chat": WorkerChat(), "tools": PlainTools(), "judge": same_text}
    return GenerationWorker(name, max_running=64, balancer=Local(balancer), **{**settings, **parts})


@asynccontextmanager
async def serving(balancer: Any, name: str = "generation/0", **parts: Any) -> AsyncGenerator[GenerationWorker, None]:
    """A worker that plays what the balancer grants, until the block ends."""
    one = worker(balancer, name, **parts)
    await one.start()
    await one.serve()
    yield one
    await one.close()


def requests(count: int) -> list[RolloutRequest]:
    return [request(problem, rollout_id=f"r{i}") for i, problem in enumerate(adding_problems(count))]


async def submit(balancer: BalancerService, wanted: Sequence[RolloutRequest]) -> None:
    starts = [RolloutState.start(one, CHAT.prompt_ids(one.problem)) for one in wanted]
    await balancer.submit([(rollout_load(state), state) for state in starts])


ACKNOWLEDGED: WeakKeyDictionary[GenerationWorker, int] = WeakKeyDictionary()
"""By the tests that read a worker more than once."""


async def collect(one: GenerationWorker, count: int) -> dict[str, TrajectorySummary | DroppedRollout]:
    found: dict[str, TrajectorySummary | DroppedRollout] = {}

    async def read() -> None:
        while len(found) < count:
            batch = await one.take_finished(10, ACKNOWLEDGED.get(one, 0))
            ACKNOWLEDGED[one] = batch.number
            ended = [end.summary if isinstance(end, Trajectory) else end for end in batch.items]
            found.update({end.rollout_id: end for end in ended})

    await asyncio.wait_for(read(), 60)
    return found


async def test_granted_rollouts_are_played_and_delivered_once_each():
    balancer = BalancerService()
    async with serving(balancer) as one:
        await submit(balancer, requests(40))
        found = await collect(one, 40)
        assert found.keys() == {f"r{i}" for i in range(40)}
        await drained(balancer)  # results come before the last ends are reported there
        snapshot = await balancer.snapshot()
        assert (snapshot.finished, snapshot.waiting, snapshot.in_flight) == (40, 0, 0)


async def test_a_rollout_that_is_moved_continues_on_another_replica_from_its_last_turn():
    balancer, engine, tools = BalancerService(), HeldEngine(SkilledPolicy(slip=1.0)), PlainTools()
    async with serving(balancer, "generation/0", engine=engine, tools=tools) as first:
        await submit(balancer, requests(1))
        await engine.holds(1)
        other = FakeEngine(SkilledPolicy(skill=1.0), policy_version=0)
        second = worker(balancer, "generation/1", engine=other, tools=tools)
        await second.start()
        await second.serve()
        balancer.balancer.set_serving("generation/0", False)  # so that it can only continue at the other
        balancer.balancer.orders.append(("generation/0", Move("r0", "generation/0", "generation/1")))
        balancer.wake()
        async with asyncio.timeout(10):
            while not first._residents["r0"].leaves:
                await asyncio.sleep(0.01)
        engine.go.set()
        found = await collect(second, 1)
        assert isinstance(found["r0"], TrajectorySummary) and found["r0"].num_turns >= 2
        stays = [(stay.replica_id, stay.turn, stay.why) for stay in found["r0"].placements]
        why = "most room by expected KV"
        assert stays == [("generation/0", 0, why), ("generation/1", 1, why)]
        assert tools.turns == [*range(len(tools.turns))]  # the other replica continues their count
        assert len(found["r0"].turn_s) == found["r0"].num_turns
        assert "r0" not in first._residents
    await second.close()


@pytest.fixture(autouse=True)
def nobody_kills_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no driver."""
    monkeypatch.setattr("actors.generation.worker.LAST_WORDS_S", 0.2)


async def test_an_engine_that_dies_while_nothing_waits_for_it_ends_the_worker_with_the_reason(
    caplog: pytest.LogCaptureFixture,
):
    ended, engine = asyncio.Event(), FakeEngine()
    async with serving(BalancerService(), engine=engine, die=ended.set) as one:
        poll = asyncio.ensure_future(one.take_finished(60, 0))
        await asyncio.sleep(0)
        engine.died.set()
        with pytest.raises(EngineError, match="the engine does not serve: its process was killed"):
            await asyncio.wait_for(poll, 60)
        await asyncio.wait_for(ended.wait(), 60)
    assert caplog.messages == ["this worker ends: the engine does not serve: its process was killed"]


async def test_a_replica_in_quarantine_hands_its_rollouts_back_and_ends_with_the_reason():
    class Odd(FakeEngine):
        """Reports an impossible load, and finishes only first turns."""

        async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
            if not asked["request_id"].endswith("turn-0"):
                try:
                    await asyncio.Event().wait()
                finally:
                    stopped.append(asked["request_id"])
            return await super().generate(prompt_ids, **asked)

        def load(self) -> ReplicaLoad:
            return ReplicaLoad(kv_used_tokens=10**9)

    balancer, ended, stopped = BalancerService(), asyncio.Event(), list[str]()
    async with serving(balancer, engine=Odd(SkilledPolicy(slip=1.0)), die=ended.set) as one:
        await submit(balancer, requests(4))
        with pytest.raises(Quarantined, match="generation/0 is in quarantine: it reports 1000000000 KV tokens"):
            await asyncio.wait_for(one.take_finished(60, 0), 60)
        await asyncio.wait_for(ended.wait(), 60)
        assert stopped  # another replica plays them now
        async with serving(balancer, "generation/1") as healthy:
            found = await collect(healthy, 4)
        stays = [end.placements[-1] for end in found.values() if isinstance(end, TrajectorySummary)]
        assert len(stays) == 4 and any(stay.turn for stay in stays)
        assert {stay.replica_id for stay in stays} == {"generation/1"}
        reason = "generation/0: reports 1000000000 KV tokens in use of 100000"
        assert (await balancer.step_figures()).quarantined == (reason,)


async def test_a_dead_engine_hands_its_rollouts_back_before_the_worker_ends():
    balancer, ended = BalancerService(), asyncio.Event()
    dying = worker(balancer, "generation/0", engine=FakeEngine(SkilledPolicy(), lives=12), die=ended.set)
    await dying.start()
    await dying.serve()
    await submit(balancer, requests(16))
    await asyncio.wait_for(ended.wait(), 60)
    async with serving(balancer, "generation/1") as healthy:
        await balancer.replica_lost("generation/0")
        delivered: set[str] = set()
        with suppress(EngineError):  # nothing had ended
            before = await dying.take_finished(0, 0)
            delivered |= {ended.summary.rollout_id for ended in before.items if isinstance(ended, Trajectory)}
        found = await collect(healthy, 16 - len(delivered))
        assert found.keys() | delivered == {f"r{i}" for i in range(16)}


async def test_a_worker_that_was_taken_for_lost_is_not_started_again_and_registers_with_what_is_resident():
    balancer, engine = BalancerService(), HeldEngine()
    one = worker(balancer, engine=engine)
    facts = await one.start()
    await one.serve()
    await submit(balancer, requests(5))
    await engine.holds(5)
    await balancer.replica_lost("generation/0")
    assert await one.start() is facts
    await one.serve()
    engine.go.set()
    assert len(await collect(one, 5)) == 5
    await drained(balancer)
    assert (await balancer.snapshot()).finished == 5
    await one.close()


async def test_a_dead_engine_waits_a_moment_and_no_more_for_a_balancer_that_is_dead_too():
    class Gone(BalancerService):
        async def return_rollouts(self, replica_id: str, items: Sequence[Any]) -> None:
            await asyncio.Event().wait()

    balancer, ended = Gone(), asyncio.Event()
    async with serving(balancer, engine=FakeEngine(lives=0), die=ended.set):
        await submit(balancer, requests(1))
        await asyncio.wait_for(ended.wait(), 60)


async def test_a_sandbox_that_fails_ends_a_rollout_as_dropped_with_its_reason():
    balancer = BalancerService()
    async with serving(balancer, tools=PlainTools(UnreliableSandbox(fails_every=1))) as one:
        await submit(balancer, requests(3))
        found = await collect(one, 3)
        assert all(isinstance(end, DroppedRollout) and "no executor left" in end.reason for end in found.values())


async def test_an_internal_fault_ends_the_stream_instead_of_the_run_waiting_for_ever():
    class Buggy(AddingSandbox):
        async def __call__(self, call: object) -> Any:
            raise MemoryError("no room")

    balancer = BalancerService()
    async with serving(balancer, tools=PlainTools(Buggy())) as one:
        await submit(balancer, requests(1))
        with pytest.raises(MemoryError, match="no room"):
            await collect(one, 1)


async def test_a_worker_registers_again_after_the_balancer_came_back_empty():
    class Reborn:
        """A balancer that loses its memory once."""

        def __init__(self) -> None:
            self.now = BalancerService()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.now, name)

    balancer = Reborn()
    async with serving(balancer) as one:
        await submit(balancer, requests(4))  # type: ignore[arg-type]
        await collect(one, 4)
        old, balancer.now = balancer.now, BalancerService()
        await old.replica_lost("generation/0")  # wakes the open question, as the death of the actor does
        await submit(balancer, [request(p, rollout_id=f"s{i}") for i, p in enumerate(adding_problems(4))])  # type: ignore[arg-type]
        assert (await collect(one, 4)).keys() >= {f"s{i}" for i in range(4)}


async def test_a_rollout_that_ends_between_two_tries_of_a_registration_does_not_stay_in_the_balancer():
    class Unreachable(BalancerService):
        """The first registration after a restart is not answered; the end of a rollout is refused meanwhile."""

        tries = 0
        refused = asyncio.Event()

        async def register(self, replica: Registration) -> list[str]:
            self.tries += 1
            if self.tries == 2:
                engine.go.set()
                await self.refused.wait()
                raise ActorUnavailableError("it restarts", None)
            return await super().register(replica)

        async def report(self, replica_id: str, turns: Sequence[TurnReport] = (), load: Any = None) -> None:
            try:
                await super().report(replica_id, turns, load)
            except UnknownReplica:
                self.refused.set()
                raise

    balancer, engine = Unreachable(), HeldEngine(SkilledPolicy(skill=1.0, slip=0.0))
    async with serving(balancer, engine=engine, tools=PlainTools(UnreliableSandbox(fails_every=1))) as one:
        await submit(balancer, requests(1))
        await engine.holds(1)
        await balancer.replica_lost("generation/0")
        await balancer.cancel(["r0"])  # as another replica has ended it
        await collect(one, 1)
        async with asyncio.timeout(60):
            while balancer.tries < 3:
                await asyncio.sleep(0.01)
        assert (await balancer.snapshot()).in_flight == 0


class Forgetful(AddingSandbox):
    """Loses its state in the call with this number."""

    def __init__(self, loses_at: int) -> None:
        self.calls_left = loses_at

    async def __call__(self, call: ToolCall) -> ToolResult:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ToolStateLost("the notebook is gone")
        return await super().__call__(call)


async def test_a_rollout_whose_tool_lost_its_state_begins_again_and_is_counted():
    balancer, tools = BalancerService(), PlainTools(Forgetful(loses_at=1))
    async with serving(balancer, tools=tools) as one:
        await submit(balancer, requests(1))
        (summary,) = (await collect(one, 1)).values()
        assert isinstance(summary, TrajectorySummary) and summary.restarts == 1
        assert tools.closed == ["r0", "r0"]


async def test_nobody_continues_with_what_a_rollout_had_before_it_began_again(tmp_path: Path):
    class Slipping(FakeEngine):
        """Calls twice; and once the rollout began again, it waits."""

        turns = 0

        async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
            self.turns += 1
            if self.turns > 2:
                await asyncio.Event().wait()
            return as_completion(call(f"{self.turns}+1"), asked["max_tokens"])

    balancer, engine = BalancerService(), Slipping()
    kept = JournalWriter(TurnJournal(tmp_path, "generation/0-life"))
    async with serving(balancer, engine=engine, tools=PlainTools(Forgetful(loses_at=2)), journal=kept):
        (wanted,) = [replace(asked, rollout_id=f"stage1/3/{asked.rollout_id}") for asked in requests(1)]
        await submit(balancer, [wanted])
        async with asyncio.timeout(60):
            while engine.turns < 3:
                await asyncio.sleep(0.01)
        start = RolloutState.start(wanted, CHAT.prompt_ids(wanted.problem))
        assert journaled(tmp_path, [start], {0: 0}) == {wanted.rollout_id: replace(start, restarts=1)}


class Counted(PlainTools):
    """With an environment that counts turns, and gives their number where a limit ends the rollout."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(environment="mine:Counting")
        self.fails = fails
        self.ends: list[StopReason] = []

    def open(self, state: RolloutState) -> Any:
        return CountedTurns(self, state)


class CountedTurns(OpenTools):
    tools: Any
    turns = 0

    async def converse(self, said: str) -> tuple[Reply, ToolMemory]:
        self.turns += 1
        return Reply(text="go on"), ToolMemory(calls=self.turns)

    async def ended(self, reason: StopReason) -> tuple[float | None, ToolMemory]:
        self.tools.ends.append(reason)
        if self.tools.fails:
            raise ToolError("the environment is gone")
        return float(self.turns), ToolMemory(calls=self.turns + 1)


class Chatting(FakeEngine):
    async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
        return as_completion("hm", asked["max_tokens"])


async def played_in_environment(tools: Counted, journal: Path) -> tuple[RolloutState, Any]:
    balancer = BalancerService()
    kept = JournalWriter(TurnJournal(journal, "generation/0-life"))
    async with serving(balancer, engine=Chatting(), tools=tools, journal=kept) as one:
        limits = replace(LIMITS, max_environment_turns=2)
        wanted = request(limits=limits, rollout_id="stage1/3/r0")
        await submit(balancer, [wanted])
        (end,) = (await collect(one, 1)).values()
    return RolloutState.start(wanted, CHAT.prompt_ids(wanted.problem)), end


async def test_the_environments_reward_for_a_rollout_that_a_limit_ended_is_delivered_and_survives_the_worker(
    tmp_path: Path,
):
    tools = Counted()
    start, end = await played_in_environment(tools, tmp_path)
    assert (end.stop_reason, end.reward, tools.ends) == (StopReason.MAX_TURNS, 2.0, [StopReason.MAX_TURNS])
    (found,) = journaled(tmp_path, [start], {0: 0}).values()
    assert (found.stop_reason, found.reward) == (StopReason.MAX_TURNS, 2.0)


async def test_a_judge_that_fails_leaves_the_rollout_unjudged_and_its_place_is_freed_once():
    async def broken(completion: str, problem: Problem) -> Judgement:
        raise JudgeError("it hung")

    balancer = BalancerService()
    async with serving(balancer, judge=broken) as one:
        await submit(balancer, requests(3))
        found = await collect(one, 3)
        assert {end.unjudged for end in found.values() if isinstance(end, TrajectorySummary)} == {"judging: it hung"}
        await drained(balancer)
        snapshot = await balancer.snapshot()
        assert (snapshot.finished, snapshot.in_flight) == (3, 0)
