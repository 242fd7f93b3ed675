"""The client that spreads calls over executors, with fakes in place of actors."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from actors import remote, sandbox_executor
from actors.remote import Remote
from actors.sandbox_executor import Answer, Failure, SandboxClient, SandboxExecutor
from rstar_ray.config import SandboxConfig
from rstar_ray.errors import SandboxError
from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import ToolCall
from sandbox.request import ExecutionRequest, ExecutionResult

CONFIG = SandboxConfig(time_limit_s=0.1, deadline_s=5.0)


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_executor, "REST_S", 0.05)


class Starts:
    """Unavailable for so many questions, and then there."""

    def __init__(self, unavailable: int = 0) -> None:
        self.unavailable = unavailable

    async def remote(self) -> str:
        if self.unavailable:
            self.unavailable -= 1
            raise ActorUnavailableError("it starts again", None)
        return "namespaces"


class FakeExecutor:
    """Echoes code; "slow" waits to be released, fails for our reasons while `broken`, dies while `dead`."""

    def __init__(self, *, broken: bool = False, dead: bool = False) -> None:
        self.broken, self.dead = broken, dead
        self.batches: list[list[ExecutionRequest]] = []
        self.released = asyncio.Event()
        self.run = self
        self.start = Starts()

    def options(self, **_: Any) -> "FakeExecutor":
        return self

    def remote(self, batch: Sequence[tuple[int, ExecutionRequest]], caller: str) -> AsyncIterator[Any]:
        self.batches.append([work for _, work in batch])
        return self._stream(batch)

    async def _stream(self, batch: Sequence[tuple[int, ExecutionRequest]]) -> AsyncIterator[Any]:
        if self.dead:
            raise ConnectionError("the actor died")
        slow = [item for item in batch if item[1].code == "slow"]
        yield _ready([(number, self._answer(work)) for number, work in batch if (number, work) not in slow])
        if slow:
            await self.released.wait()
            yield _ready([(number, self._answer(work)) for number, work in slow])

    def _answer(self, work: ExecutionRequest) -> Answer:
        if self.broken:
            return Failure("no worker")
        if work.trusted:
            pairs = json.loads(str(work.stdin))
            hung = any("hang" in pair for pair in pairs)
            return ExecutionResult(
                outcome=Outcome.TIMEOUT if hung else Outcome.OK,
                stdout="".join("=" if a == t else "/" for a, t in pairs),
                reason="it hung" if hung else "",
            )
        return ExecutionResult(outcome=Outcome.OK, stdout=work.code)


async def _ready(answers: Any) -> Any:
    return answers


def client_of(executors: Mapping[str, Any], config: SandboxConfig = CONFIG, **parts: Any) -> SandboxClient:
    actors = [Remote[SandboxExecutor](executor, name) for name, executor in executors.items()]
    return SandboxClient(actors, config, **{"caller": "generation/0", **parts})


def client(**executors: FakeExecutor) -> SandboxClient:
    return client_of(executors)


async def test_calls_go_out_in_batches_and_come_back_to_their_callers():
    executor = FakeExecutor()
    tools = client(a=executor)
    results = await asyncio.gather(*(tools.execute(ToolCall(code=f"print({i})")) for i in range(150)))
    assert [result.text for result in results] == [f"print({i})" for i in range(150)]
    assert [len(batch) for batch in executor.batches] == [64, 64, 22]


@pytest.mark.parametrize("trouble", ["broken", "dead"])
async def test_a_call_whose_executor_fails_is_repeated_on_another_and_the_model_never_sees_it(trouble: str):
    bad, good = FakeExecutor(**{trouble: True}), FakeExecutor()
    tools = client(a=bad, b=good)
    results = await asyncio.gather(*(tools.execute(ToolCall(code=str(i))) for i in range(20)))
    assert [result.text for result in results] == [str(i) for i in range(20)]
    assert all(result.outcome is Outcome.OK for result in results)


async def test_an_executor_that_fails_every_call_at_once_does_not_draw_them_all():
    bad, good = FakeExecutor(broken=True), FakeExecutor()
    tools = client_of({"a": bad, "b": good}, replace(CONFIG, deadline_s=60), caller="generation/0")
    tools._rest_s = 60.0
    for number in range(8):
        assert (await tools.execute(ToolCall(code=str(number)))).text == str(number)
    assert len(bad.batches) == 1


class OddExecutor(FakeExecutor):
    """Answers each call twice, one that nobody made, and to the first batch with a malformed answer."""

    async def _stream(self, batch: Sequence[tuple[int, ExecutionRequest]]) -> AsyncIterator[Any]:
        answers = [(number, self._answer(work)) for number, work in batch]
        if len(self.batches) == 1:
            answers = [(number, Failure("odd") if number % 2 else {"stdout": "1"}) for number, _ in answers]  # type: ignore[misc]
        yield _ready([(max(number for number, _ in answers) + 1_000, ExecutionResult(outcome=Outcome.OK)), *answers])
        yield _ready(answers)


async def test_answers_given_twice_or_to_nobody_are_passed_over_and_malformed_ones_are_asked_for_again():
    tools = client(a=OddExecutor())
    results = await asyncio.gather(*(tools.execute(ToolCall(code=f"{i} + 1")) for i in range(3)))
    assert [result.text for result in results] == ["0 + 1", "1 + 1", "2 + 1"]


async def test_an_executor_that_ends_without_a_word_is_passed_over_at_once():
    class Silent(FakeExecutor):
        async def _stream(self, batch: Sequence[tuple[int, ExecutionRequest]]) -> AsyncIterator[Any]:
            return
            yield

    tools = client_of({"a": Silent(), "b": FakeExecutor()}, replace(CONFIG, deadline_s=60), caller="generation/0")
    async with asyncio.timeout(60):
        assert (await tools.execute(ToolCall(code="1 + 1"))).text == "1 + 1"
        with pytest.raises(SandboxError, match=r"failed 3 times, last on a: StopAsyncIteration$"):
            await client(a=Silent()).execute(ToolCall(code="1"))


async def test_while_the_only_executor_starts_again_a_call_waits_and_spends_no_try(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.01)

    class Starting(FakeExecutor):
        async def _stream(self, batch: Sequence[tuple[int, ExecutionRequest]]) -> AsyncIterator[Any]:
            if len(self.batches) == 1 or self.start.unavailable:
                raise ActorUnavailableError("it starts again", None)
            yield _ready([(number, self._answer(work)) for number, work in batch])

    executor = Starting()
    executor.start = Starts(unavailable=20)
    assert (await client(a=executor).execute(ToolCall(code="1 + 1"))).text == "1 + 1"
    assert len(executor.batches) == 2 and not executor.start.unavailable


async def test_a_call_that_fails_everywhere_is_our_error_and_no_outcome():
    tools = client(a=FakeExecutor(broken=True), b=FakeExecutor(dead=True))
    with pytest.raises(SandboxError, match="failed 3 times"):
        await tools.execute(ToolCall(code="1"))


async def test_a_call_without_an_answer_ends_at_its_deadline_as_our_error():
    config = SandboxConfig(time_limit_s=0.05, wall_limit_s=0.05, deadline_s=0.1)
    tools = client_of({"a": FakeExecutor()}, config, caller="g")
    with pytest.raises(SandboxError, match="waited"):
        await tools.execute(ToolCall(code="slow"))


async def test_every_call_of_an_executor_gets_one_answer_whatever_goes_wrong_inside():
    class Pool:
        level = "namespaces"

        async def start(self) -> "Pool":
            return self

        async def run(self, request: ExecutionRequest, caller: str, deadline_s: float) -> ExecutionResult:
            if request.code == "bug":
                raise KeyError("a bug")
            return ExecutionResult(outcome=Outcome.OK, stdout=request.code)

    executor = sandbox_executor.SandboxExecutor("sandbox/0", SandboxConfig())
    executor._pool = Pool()  # type: ignore[assignment]
    batch = [(0, ExecutionRequest(code="bug")), (1, ExecutionRequest(code="1"))]
    answers = [answer async for part in executor.run(batch, "g") for answer in part]
    assert sorted(number for number, _ in answers) == [0, 1]
    assert isinstance(dict(answers)[0], Failure)
