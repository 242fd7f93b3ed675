"""What a worker survives: a balancer that is wedged, a rollout that cannot be played, a disk that is full."""

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from actors.balancer_service import BalancerService
from actors.generation import worker as worker_module
from actors.generation.outbox import JournalWriter
from rstar_ray.agent.journal import TurnJournal
from rstar_ray.chat.template import Reading
from rstar_ray.errors import RStarError
from rstar_ray.reward.judge import Judgement
from rstar_ray.rollouts import DroppedRollout
from rstar_ray.trajectory import Completion, Problem, ToolCall, ToolResult, TrajectorySummary
from tests.actors.test_generation_worker import FakeEngine, WorkerChat, collect, requests, serving, submit
from tests.fakes import AddingSandbox, PlainTools, adding_problems, drained, request


class Stopped:
    """A balancer that is stopped as by SIGSTOP: calls of these methods wait until it continues, if it ever does."""

    def __init__(self, *methods: str) -> None:
        self.now = BalancerService()
        self.methods = methods
        self.resumed = asyncio.Event()
        self.given_up = 0  # calls
        self.changed = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.now, name)
        return self._later(method) if name in self.methods and not self.resumed.is_set() else method

    def _later(self, method: Any) -> Any:
        async def called(*arguments: Any, **named: Any) -> Any:
            try:
                await self.resumed.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                self.changed.set()
                raise
            return await method(*arguments, **named)

        return called

    async def is_given_up(self, times: int) -> None:
        async with asyncio.timeout(60):
            while self.given_up < times:
                self.changed.clear()
                await self.changed.wait()


@pytest.mark.parametrize("method", ["report", "next_orders"])
async def test_a_balancer_that_is_stopped_for_longer_than_any_call_waits_ends_no_engine(
    monkeypatch: pytest.MonkeyPatch, method: str
):
    monkeypatch.setattr(worker_module, "CALL_DEADLINE_S", 0.02)
    monkeypatch.setattr(worker_module, "ORDERS_WAIT_S", 0.02)
    balancer = Stopped(method)
    async with serving(balancer) as one:
        if method == "next_orders":  # else it would have no work to report
            await balancer.is_given_up(2)
            balancer.resumed.set()
        await submit(balancer, requests(20))  # type: ignore[arg-type]
        found = await collect(one, 20)
        if method == "report":
            await balancer.is_given_up(2)
            balancer.resumed.set()
        assert found.keys() == {f"r{i}" for i in range(20)}
        await drained(balancer.now)
        snapshot = await balancer.now.snapshot()
        assert (snapshot.finished, snapshot.waiting, snapshot.in_flight) == (20, 0, 0)
        assert not [load for load in snapshot.replicas if load.quarantine]


async def test_a_balancer_that_is_stopped_while_a_worker_registers_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_module, "CALL_DEADLINE_S", 0.02)
    balancer = Stopped("register")
    async with serving(balancer) as one:
        await balancer.is_given_up(3)
        balancer.resumed.set()
        await submit(balancer, requests(3))  # type: ignore[arg-type]
        assert len(await collect(one, 3)) == 3


class OddEngine(FakeEngine):
    """Fails for one rollout."""

    def __init__(self, fault: Exception) -> None:
        super().__init__()
        self._fault = fault

    async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
        if asked["request_id"].startswith("r1/"):
            raise self._fault
        return await super().generate(prompt_ids, **asked)


class OddChat(WorkerChat):
    """Cannot read what the second rollout says."""

    def read(self, token_ids: Sequence[int], *, after_tools: bool, own_tools: bool = False) -> Reading:
        if adding_problems(2)[1].problem in self.decode(token_ids).replace("-", "+"):
            raise IndexError("a parser of vLLM's\nmet odd text")
        return super().read(token_ids, after_tools=after_tools)


class OddSandbox(AddingSandbox):
    """An actor that could not answer the second rollout's call."""

    async def __call__(self, call: ToolCall) -> ToolResult:
        if call.code.replace("-", "+") == adding_problems(2)[1].problem:
            failed = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
            raise RayTaskError("call", f"Traceback\n{failed}", failed).as_instanceof_cause()
        return await super().__call__(call)


async def odd_judge(completion: str, problem: Problem) -> Judgement:
    if problem.id == "add-1":
        raise RecursionError("an odd answer")
    return Judgement(1.0)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        pytest.param({"engine": OddEngine(ValueError("token id 9"))}, "ValueError: token id 9", id="refused"),
        pytest.param({"engine": OddEngine(RStarError("waited 9 s"))}, "RStarError: waited 9 s", id="late"),
        pytest.param({"chat": OddChat()}, "IndexError: met odd text", id="unread"),
        pytest.param({"tools": PlainTools(OddSandbox())}, "UnicodeEncodeError: 'utf-8' codec", id="uncalled"),
        pytest.param({"judge": odd_judge}, "RecursionError: an odd answer", id="unjudged"),
    ],
)
async def test_a_rollout_that_cannot_be_played_is_dropped_by_name_and_the_others_continue(
    parts: dict[str, Any], reason: str
):
    balancer = BalancerService()
    async with serving(balancer, **parts) as one:
        await submit(balancer, requests(5))
        found = await collect(one, 5)
        dropped = [end for end in found.values() if isinstance(end, DroppedRollout)]
        assert [end.rollout_id for end in dropped] == ["r1"]
        assert dropped[0].reason.startswith(f"rollout r1: {reason}")
        await drained(balancer)
        assert (await balancer.snapshot()).in_flight == 0
        await submit(balancer, [request(adding_problems(1)[0], rollout_id="later")])
        assert isinstance((await collect(one, 1))["later"], TrajectorySummary)


class FullDisk(TurnJournal):
    """Has no room while the test says so."""

    full = True

    def flush(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().flush()


async def test_a_disk_that_is_full_ends_no_worker_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    balancer, engine = BalancerService(), FakeEngine()
    journal = FullDisk(tmp_path, "generation/0-life")
    async with serving(balancer, engine=engine, journal=JournalWriter(journal, where="runs/x/journal")) as one:
        for version in range(3):
            journal.full = version < 2
            await one.swap(engine.update_weights(version, [], ""))
            wanted = [replace(asked, rollout_id=f"stage1/{version}/{asked.rollout_id}") for asked in requests(8)]
            await submit(balancer, wanted)
            found = await collect(one, 8)
            assert all(isinstance(end, TrajectorySummary) for end in found.values())
            await drained(balancer)
        assert caplog.messages == [
            "runs/x/journal cannot be written ([Errno 28] No space left on device): turns that finish now are sampled "
            "again if this worker dies",
            "runs/x/journal is written again",
        ]
