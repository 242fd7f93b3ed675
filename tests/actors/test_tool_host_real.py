"""Hosts of tools as real actors, under a real detector: stopped, killed, held up, and merely busy."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors import tool_client
from actors.health import watchdog
from actors.health.watchdog import Watchdog
from actors.tool_client import RolloutTools, Tools
from actors.tool_host import hosts_up, start_hosts
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.config import DetectorConfig, ToolsConfig
from rstar_ray.errors import RStarError, ToolStateLost
from rstar_ray.outcome import Outcome
from rstar_ray.tools.loader import tool_specs
from rstar_ray.trajectory import ToolCall, ToolResult
from tests.fakes import request
from tests.logged import logged_lines

pytestmark = pytest.mark.real
OWN = """
import asyncio, os, re, time
from pathlib import Path
from rstar_ray.tools.tool import Tool

if (starting := Path(__file__).with_name("starting")).exists():
    starting.write_text(str(os.getpid()))
    time.sleep(60)

class Words:
    def __init__(self, problem, snapshot):
        self.words = snapshot or ""
    async def call(self, text):
        self.words += text
        return self.words

class Kept(Words):
    def snapshot(self):
        return self.words

async def wait(text):
    await asyncio.sleep(float(text))
    return "waited"

async def block(text):
    time.sleep(float(text))
    return "blocked"

async def lock(text):
    re.fullmatch("(a+)+b", "a" * int(text))  # keeps the interpreter's lock, for twice as long with each more
    return "matched"

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

def tool(name, **runs):
    return Tool(name=name, description="?", parameters=TEXT, **{"deadline_s": 10.0, **runs})

tools = [
    tool("kept", state=Kept), tool("words", state=Words), tool("wait", function=wait), tool("block", function=block),
    tool("late", function=wait, deadline_s=0.5), tool("cut", function=block, deadline_s=0.5),
    tool("lock", function=lock, deadline_s=0.5),
]
"""
NAME = "tools/mine:tools/0"
CONFIG = DetectorConfig(probe_every_s=0.2, silent_s=2.0, learner_silent_s=2.0, engine_step_s=2.0)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(OWN)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield folder
    ray.shutdown()


class Hosted:
    """One host under a detector, and what that showed."""

    def __init__(self, host: Any, shown: list[str], tools: Tools) -> None:
        self.host, self.shown, self.tools = host, shown, tools

    def rollout(self, name: str = "r") -> RolloutTools:
        return self.tools.open(RolloutState.start(replace(request(), rollout_id=name), [1]))

    async def pid(self) -> int:
        return (await self.host.probe.remote()).pid

    async def send(self, number: signal.Signals) -> int:
        pid = await self.pid()
        os.kill(pid, number)
        return pid

    async def until_shown(self, text: str, seconds: float = 120.0) -> str:
        async with asyncio.timeout(seconds):
            while True:
                if found := [line for line in self.shown if text in line]:
                    return found[0]
                await asyncio.sleep(0.05)


@asynccontextmanager
async def hosted(own: Path, *, detector: bool = True) -> AsyncIterator[Hosted]:
    specs = tool_specs(("mine:tools",), str(own))
    hosts = start_hosts(ToolsConfig(use=("mine:tools",)), specs, str(own))
    watching = Watchdog(CONFIG)
    watching.start()
    try:
        await hosts_up(hosts)
        if detector:
            hosts[NAME].silent_s = CONFIG.silent_s
            hosts[NAME].serves()
            watching.follow(hosts[NAME])
        tools = Tools(specs, None, {"mine:tools": [hosts[NAME]]}, caller="test")  # type: ignore[arg-type]
        with logged_lines() as shown:
            yield Hosted(hosts[NAME].handle, shown, tools)
    finally:
        await watching.close()
        ray.kill(hosts[NAME].handle)
        async with asyncio.timeout(600):
            while NAME in ray.util.list_named_actors():
                await asyncio.sleep(0.05)


def call(tools: RolloutTools, tool: str, text: str) -> Awaitable[ToolResult]:
    return tools.execute(ToolCall(tool=tool, arguments={"text": text}))


async def test_a_host_that_is_stopped_in_a_call_is_named_killed_and_the_call_made_again(own: Path):
    async with hosted(own) as one:
        calling = asyncio.ensure_future(call(one.rollout(), "wait", "1"))
        await asyncio.sleep(0.3)
        pid = await one.send(signal.SIGSTOP)
        result = await asyncio.wait_for(calling, 600)
        assert (result.outcome, result.text) == (Outcome.OK, "waited")
        assert f"process {pid} is killed and fails over" in await one.until_shown(f"{NAME} was silent for")
        assert await one.pid() != pid


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_an_idle_host_that_is_lost_is_noticed_and_what_its_states_cost_is_said(own: Path, number: signal.Signals):
    async with hosted(own) as one:
        rollouts = [one.rollout(name) for name in "abc"]
        for rollout in rollouts:
            await call(rollout, "kept", "x")
        await call(rollouts[0], "words", "x")
        await asyncio.sleep(2 * CONFIG.probe_every_s + 0.2)  # it has said what it has
        await one.send(number)
        died = await one.until_shown(f"{NAME} died")
        assert died.endswith(
            "; lost with it: the states of 4 rollouts, of which 1 had no snapshot: those rollouts start again"
        )
        assert (await call(rollouts[1], "kept", "y")).text == "xy"
        with pytest.raises(ToolStateLost):
            await call(rollouts[0], "words", "y")


async def test_a_tool_that_takes_its_time_is_not_taken_for_a_wedged_one(own: Path):
    async with hosted(own) as one:
        pid, rollout = await one.pid(), one.rollout()
        assert (await call(rollout, "wait", "4")).outcome is Outcome.OK
        assert one.shown == []
        assert (await call(rollout, "block", "6")).text == "blocked"  # twice the limit, and the loop does not turn
        assert [line for line in one.shown if "has blocked it" not in line] == []
        assert await one.pid() == pid
        (line,) = one.shown
        assert line.startswith(f"{NAME}: a call has blocked it and all its other calls for 5 s")


async def test_a_call_that_blocks_beyond_its_deadline_is_a_time_out_and_the_host_comes_back(
    own: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tool_client, "GRACE_S", 1.0)
    async with hosted(own) as one:
        pid, rollout = await one.pid(), one.rollout()
        cut = await call(rollout, "cut", "60")
        assert (cut.outcome, cut.text) == (Outcome.TIMEOUT, "Error: no answer within 0.5 s.")
        assert (await call(rollout, "wait", "0")).outcome is Outcome.OK
        assert await one.pid() != pid
        ended_already = f"process {pid} "  # by its caller, and Ray had not said so yet
        assert not [line for line in one.shown if "was silent" in line and ended_already not in line]


async def test_a_call_that_keeps_the_interpreters_lock_is_a_time_out_in_the_end(
    own: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tool_client, "GRACE_S", 0.5)
    monkeypatch.setattr(tool_client, "LOOK_S", 0.5)
    async with hosted(own) as one:
        assert (await call(one.rollout(), "lock", "60")).outcome is Outcome.TIMEOUT
        assert (await asyncio.wait_for(call(one.rollout(), "wait", "0"), 600)).outcome is Outcome.OK


async def test_a_stopped_host_is_ended_by_who_calls_it_where_there_is_no_detector(
    own: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in a talk."""
    monkeypatch.setattr(tool_client, "GRACE_S", 0.5)
    monkeypatch.setattr(tool_client, "LOOK_S", 0.5)
    async with hosted(own, detector=False) as one:
        pid = await one.send(signal.SIGSTOP)
        assert (await asyncio.wait_for(call(one.rollout(), "late", "0"), 600)).text == "waited"
        assert not psutil.pid_exists(pid) and await one.pid() != pid


@pytest.mark.slow
async def test_a_host_that_is_stopped_in_the_start_after_its_death_is_ended_too(
    own: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "RESTART_S", 18.0)
    starting = own / "starting"
    async with hosted(own) as one:
        starting.touch()
        try:
            await one.send(signal.SIGKILL)
            async with asyncio.timeout(600):
                while not (pid := starting.read_text()):
                    await asyncio.sleep(0.05)
        finally:
            starting.unlink()
        os.kill(int(pid), signal.SIGSTOP)
        assert "its next process is killed" in await one.until_shown(f"{NAME} did not come back")
        await one.until_shown(f"{NAME} died")
        assert not psutil.pid_exists(int(pid))
        assert (await call(one.rollout(), "wait", "0")).outcome is Outcome.OK


async def test_a_host_that_cannot_load_its_tool_is_named_with_the_reason(own: Path, tmp_path: Path):
    specs = tool_specs(("mine:tools",), str(own))
    hosts = start_hosts(ToolsConfig(use=("mine:tools",)), specs, str(tmp_path))
    with pytest.raises(RStarError, match=f"{NAME} did not start: ModuleNotFoundError: No module named 'mine'"):
        await hosts_up(hosts)
