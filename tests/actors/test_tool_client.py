"""All tools of a rollout, with fakes in place of hosts and sandbox."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors import tool_client
from actors.remote import Remote
from actors.tool_client import Tools
from actors.tool_host import ToolHostActor
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.errors import ToolError, ToolStateLost
from rstar_ray.outcome import Outcome
from rstar_ray.tools.environment import Reply
from rstar_ray.tools.host import HostAnswer, HostCall, ToolHost
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec, spec_of
from rstar_ray.tools.tool import Tool
from rstar_ray.trajectory import ToolCall, ToolResult
from tests.fakes import AddingSandbox, request

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


async def shout(text: str) -> str:
    return text.upper()


class Words:
    """Remembers; with a snapshot where the class says so."""

    def __init__(self, problem: Any, snapshot: str | None) -> None:
        self.words = snapshot.split() if snapshot else []

    async def call(self, text: str) -> str:
        self.words.append(text)
        return " ".join(self.words)


class KeptWords(Words):
    def snapshot(self) -> str:
        return " ".join(self.words)


class Counting:
    async def start(self, problem: Any) -> None:
        self.turns = 0

    async def reply(self, said: str) -> Any:
        self.turns += 1
        return (
            Reply(reward=1.0) if said == "done" else "nonsense" if said == "bad" else Reply(text=f"turn {self.turns}")
        )

    async def close(self) -> None: ...


class Other(Counting):
    async def reply(self, said: str) -> Any:
        return Reply(text=f"other: {said}")


SHOUT = Tool(name="shout", description="?", parameters=TEXT, function=shout)
WORDS = Tool(name="words", description="?", parameters=TEXT, state=Words)
KEPT = Tool(name="kept", description="?", parameters=TEXT, state=KeptWords)
SANDBOXED = Tool(name="sandboxed", description="?", parameters=TEXT, program="print(1)")


class FakeHost:
    """An actor that holds a host; it dies where asked to, and comes back empty.

    `silent`: its calls are not answered, and none of its methods where it is `stopped`, until it is killed.
    """

    def __init__(self, make: Callable[[], ToolHost]) -> None:
        self._make = make
        self.host = make()
        self.deaths = 0
        self.silent = False
        self.stopped = False
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(remote=getattr(self, f"_{name}"))

    def killed(self) -> None:
        self.silent = self.stopped = False
        self.host = self._make()

    async def _answers(self) -> None:
        while self.stopped:
            await asyncio.sleep(0.01)

    async def _call(self, tool: str, call: HostCall) -> HostAnswer:
        self.asked += 1
        if self.silent or self.stopped:
            await asyncio.Event().wait()
        if self.deaths:
            self.deaths -= 1
            self.host = self._make()
            raise ActorDiedError()
        return await self.host.call(call)

    async def _end(self, rollout_id: str, holder: str) -> None:
        await self.host.end(rollout_id, holder)

    async def _take_over(self, rollout_id: str, holder: str) -> None:
        self.host.take_over(rollout_id, holder)

    async def _probe(self) -> int:
        await self._answers()
        return 1

    async def _held_up(self) -> bool:
        await self._answers()
        return self.silent


class Sandbox(AddingSandbox):
    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    async def execute(self, call: ToolCall, *, seed: int) -> ToolResult:
        self.seeds.append(seed)
        return await self(call)

    async def run_tool(self, program: str, stdin: str, *, deadline_s: float, max_chars: int, seed: int) -> ToolResult:
        self.seeds.append(seed)
        return ToolResult(outcome=Outcome.OK, text=f"{program} {stdin}")


def tools_of(*tools: Tool) -> tuple[Tools, dict[str, FakeHost]]:
    specs: list[ToolSpec] = [PYTHON_TOOL, *(spec_of(tool, f"mine:{tool.name}") for tool in tools)]
    hosts = {f"mine:{tool.name}": FakeHost(lambda tool=tool: ToolHost(tool)) for tool in tools}
    hosts["mine:Counting"] = FakeHost(lambda: ToolHost(environment=Counting))
    remotes = {entry: [Remote[ToolHostActor](host, entry)] for entry, host in hosts.items()}
    return Tools(specs, Sandbox(), remotes, caller="generation/0", environment="mine:Counting"), hosts


def start() -> RolloutState:
    return RolloutState.start(request(), [1])


async def test_each_call_goes_to_its_tool():
    tools, _ = tools_of(SHOUT, SANDBOXED, KEPT)
    one = tools.open(start())
    assert (await one.execute(ToolCall(code="1+2"))).text == "3"
    assert (await one.execute(ToolCall(tool="shout", arguments={"text": "hello"}))).text == "HELLO"
    assert (await one.execute(ToolCall(tool="sandboxed", arguments={"text": "x"}))).text == 'print(1) {"text": "x"}'
    first = await one.execute(ToolCall(tool="kept", arguments={"text": "a"}))
    assert first.memory is not None and first.memory[1].snapshot == "a"


async def test_what_a_program_draws_depends_on_its_rollout_and_on_itself():
    sandbox = Sandbox()
    tools = Tools([PYTHON_TOOL, spec_of(SANDBOXED, "mine:sandboxed")], sandbox, {}, caller="generation/0")
    calls = [
        ToolCall(code="1+2"),
        ToolCall(code="1+3"),
        *(ToolCall(tool="sandboxed", arguments={"text": text}) for text in ("x", "\ud83d")),
    ]

    async def seeds(seed: int) -> dict[int, int]:
        one = tools.open(RolloutState.start(replace(request(), seed=seed), [1]))
        order = range(len(calls)) if len(sandbox.seeds) == 0 else reversed(range(len(calls)))
        return {number: (await one.execute(calls[number]), sandbox.seeds[-1])[1] for number in order}

    first, repeated, sibling = await seeds(1), await seeds(1), await seeds(2)
    assert first == repeated and len({*first.values(), *sibling.values()}) == 8
    one = tools.open(start())
    for _ in range(2):
        await one.execute(calls[0])
    assert sandbox.seeds[-1] != sandbox.seeds[-2]
    stayed, moved = tools.open(start()), tools.open(start())
    await stayed.execute(calls[0], turn=0)
    for one in (stayed, moved):  # `moved` has run its first turn elsewhere
        await one.execute(calls[0], turn=1)
    assert sandbox.seeds[-1] == sandbox.seeds[-2] != sandbox.seeds[-3]
    assert all(0 <= seed < 1 << 32 for seed in sandbox.seeds)


async def test_a_rollout_that_continues_elsewhere_and_calls_nothing_there_leaves_no_state():
    here, hosts = tools_of(WORDS)
    there = Tools(list(here.specs.values()), Sandbox(), here.hosts, caller="generation/1")
    first = await here.open(start()).execute(ToolCall(tool="words", arguments={"text": "a"}))
    assert first.memory is not None
    moved = replace(start(), memories=dict([first.memory]))
    resumed = there.open(moved)
    await there.settled()
    resumed.close()
    await there.settled()
    assert hosts["mine:words"].host.num_states == 0


async def test_a_host_that_dies_is_asked_again_and_the_state_restored_or_said_to_be_lost():
    tools, hosts = tools_of(SHOUT, KEPT, WORDS)
    one = tools.open(start())
    for name in ("kept", "words"):
        await one.execute(ToolCall(tool=name, arguments={"text": "a"}))
    for host in hosts.values():
        host.deaths = 1
    assert (await one.execute(ToolCall(tool="shout", arguments={"text": "b"}))).text == "B"
    assert (await one.execute(ToolCall(tool="kept", arguments={"text": "b"}))).text == "a b"
    with pytest.raises(ToolStateLost):
        await one.execute(ToolCall(tool="words", arguments={"text": "b"}))
    hosts["mine:shout"].deaths = 99
    with pytest.raises(ToolError, match="shout: failed 3 times"):
        await one.execute(ToolCall(tool="shout", arguments={"text": "b"}))


async def test_a_call_that_failed_for_our_reasons_is_made_again_and_is_not_a_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool_client, "REST_S", 0.0)
    reached: list[str] = []

    async def sometimes(text: str) -> str:
        reached.append(text)
        if text == "never" or len(reached) < 3:
            raise ToolError("the service is gone")
        return text

    tools, _ = tools_of(Tool(name="far", description="?", parameters=TEXT, function=sometimes))
    one = tools.open(start())
    assert (await one.execute(ToolCall(tool="far", arguments={"text": "a"}))).text == "a" and len(reached) == 3
    with pytest.raises(ToolError, match="far: failed 3 times, last: the service is gone"):
        await one.execute(ToolCall(tool="far", arguments={"text": "never"}))
    assert len(reached) == 6


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hosts that were, each of which is there again at once. A host is looked at after a twentieth of a second."""
    killed: list[Any] = []

    def kill(handle: FakeHost, no_restart: bool) -> None:
        assert not no_restart
        killed.append(handle)
        handle.killed()

    monkeypatch.setattr("ray.kill", kill)
    monkeypatch.setattr(tool_client, "GRACE_S", -9.95)
    monkeypatch.setattr(tool_client, "LOOK_S", 0.05)
    return killed


def shouted(tools: Tools, text: str = "b") -> Awaitable[ToolResult]:
    return tools.open(start()).execute(ToolCall(tool="shout", arguments={"text": text}))


async def test_a_tool_that_blocks_its_host_is_a_time_out_and_its_host_is_killed(killed: list[Any]):
    tools, hosts = tools_of(SHOUT)
    hosts["mine:shout"].silent = True
    assert (await shouted(tools)).outcome is Outcome.TIMEOUT
    assert killed == [hosts["mine:shout"]]


async def test_an_answer_that_is_late_or_lost_is_a_time_out_and_costs_no_host(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
):
    tools, hosts = tools_of(SHOUT)
    host = hosts["mine:shout"]
    host.silent = True
    monkeypatch.setattr(host, "_held_up", lambda: asyncio.sleep(0, False))
    assert (await shouted(tools)).outcome is Outcome.TIMEOUT
    assert killed == [] and host.asked == 1


async def test_a_host_that_is_silent_altogether_is_not_a_time_out_of_the_tools(killed: list[Any]):
    """As where its process is stopped: the call is made again."""
    tools, hosts = tools_of(SHOUT, *(replace(tool, deadline_s=5.0) for tool in (WORDS, KEPT)))
    one = tools.open(start())
    for name in ("words", "kept"):
        await one.execute(ToolCall(tool=name, arguments={"text": "a"}))
        hosts[f"mine:{name}"].stopped = True
    hosts["mine:shout"].stopped = True
    assert (await shouted(tools)).text == "B"
    assert killed == [hosts["mine:shout"]]
    assert (await one.execute(ToolCall(tool="kept", arguments={"text": "b"}))).text == "a b"
    with pytest.raises(ToolStateLost):
        await one.execute(ToolCall(tool="words", arguments={"text": "b"}))


async def test_a_host_that_is_silent_twice_at_one_call_is_so_for_the_call(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """As where C code keeps the interpreter's lock."""
    tools, hosts = tools_of(SHOUT)
    host = hosts["mine:shout"]

    async def keeps_the_lock(tool: str, call: HostCall) -> HostAnswer:
        host.stopped = True
        return await FakeHost._call(host, tool, call)

    monkeypatch.setattr(host, "_call", keeps_the_lock)
    assert (await shouted(tools)).outcome is Outcome.TIMEOUT
    assert killed == [host, host] and host.asked == 2


async def test_a_silent_host_is_waited_for_until_ray_has_started_another_and_no_longer_than_a_start_takes(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeHost, "killed", lambda self: None)
    monkeypatch.setattr(tool_client, "START_S", 0.3)
    tools, hosts = tools_of(SHOUT)
    host = hosts["mine:shout"]
    host.stopped = True
    asyncio.get_running_loop().call_later(0.25, setattr, host, "stopped", False)
    assert (await shouted(tools)).text == "B"
    host.stopped = True
    with pytest.raises(ToolError, match="mine:shout: its host does not come back"):
        await shouted(tools)


async def test_an_environment_answers_and_one_that_fails_is_our_error():
    tools, _ = tools_of()
    one = tools.open(start())
    reply, memory = await one.converse("hello")
    assert (reply.text, memory.calls) == ("turn 1", 1)
    with pytest.raises(ToolError, match=r"environment mine:Counting: the environment Counting gave str"):
        await one.converse("bad")
    assert (await tools.open(start()).converse("done"))[0].reward == 1.0


async def test_a_problem_is_played_in_the_environment_that_it_names():
    tools, hosts = tools_of()
    hosts["mine:Other"] = FakeHost(lambda: ToolHost(environment=Other))
    tools.hosts = {**tools.hosts, "mine:Other": [Remote[ToolHostActor](hosts["mine:Other"], "mine:Other")]}
    began = start()
    named = replace(began.request, problem=replace(began.request.problem, environment="mine:Other"))
    texts = [(await tools.open(one).converse("hello"))[0].text for one in (began, replace(began, request=named))]
    assert texts == ["turn 1", "other: hello"]


def spread(tool: Tool, num_hosts: int) -> tuple[Tools, list[FakeHost]]:
    """One tool at several hosts."""
    hosts, entry = [FakeHost(lambda: ToolHost(tool)) for _ in range(num_hosts)], f"mine:{tool.name}"
    remotes = [Remote[ToolHostActor](host, f"tools/{number}") for number, host in enumerate(hosts)]
    return Tools([spec_of(tool, entry)], Sandbox(), {entry: remotes}, caller="generation/0"), hosts


async def test_calls_without_state_use_all_hosts_and_calls_of_a_state_one():
    tools, hosts = spread(SHOUT, 3)
    for _ in range(6):
        await shouted(tools)
    assert [host.asked for host in hosts] == [2, 2, 2]
    tools, hosts = spread(KEPT, 3)
    one = tools.open(start())
    texts = [(await one.execute(ToolCall(tool="kept", arguments={"text": word}))).text for word in "abc"]
    assert texts == ["a", "a b", "a b c"] and sorted(host.asked for host in hosts) == [0, 0, 3]


async def test_a_call_without_state_that_fails_is_made_at_the_other_hosts():
    tools, hosts = spread(SHOUT, 3)
    for host in hosts:
        host.deaths = 1
    with pytest.raises(ToolError, match="shout: failed 3 times"):
        await shouted(tools)
    assert [host.asked for host in hosts] == [1, 1, 1]
