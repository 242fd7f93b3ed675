"""The example agents run the policy's programs with seeds, and name the programs that failed."""

import asyncio
import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from examples import train_agent
from rstar_ray.outcome import Outcome
from sandbox.request import ExecutionRequest
from tests.actors.test_agents import Policy, host_of, played, start
from tests.fakes import answer, call


class FakePool:
    """Fails the programs that contain "oops", and records every request."""

    def __init__(self) -> None:
        self.requests: list[ExecutionRequest] = []

    async def run(self, request: ExecutionRequest) -> Any:
        self.requests.append(request)
        outcome = Outcome.ERROR if "oops" in request.code else Outcome.OK
        return SimpleNamespace(outcome=outcome)


def pool_of(monkeypatch: pytest.MonkeyPatch, module: Any = train_agent) -> FakePool:
    pool, loop = FakePool(), asyncio.get_running_loop()
    monkeypatch.setattr(train_agent, "sandbox", lambda: (loop, pool))
    monkeypatch.setattr(module, "tool_text", lambda result: "the same text")
    return pool


async def seeds_of(pool: FakePool, seed: int) -> list[int | None]:
    pool.requests.clear()
    async with host_of(train_agent.solve) as host:
        await played(host, start(seed=seed), Policy(call("1+2"), call("1+2"), call("3"), answer("3")))
    return [request.seed for request in pool.requests]


async def test_a_program_has_the_same_seed_in_a_repeated_rollout_and_another_when_it_runs_again(
    monkeypatch: pytest.MonkeyPatch,
):
    pool = pool_of(monkeypatch)
    seeds = await seeds_of(pool, seed=7)
    assert seeds == await seeds_of(pool, seed=7)
    others = await seeds_of(pool, seed=8)
    assert len(seeds) == 3 and len({*seeds, *others}) == 6 and None not in seeds


async def test_each_failed_result_counts_once_in_the_agent_of_the_sdk(monkeypatch: pytest.MonkeyPatch):
    names = ("Agent", "MaxTurnsExceeded", "OpenAIChatCompletionsModel", "Runner", "set_tracing_disabled")
    sdk = SimpleNamespace(FunctionTool=SimpleNamespace, **dict.fromkeys(names))
    monkeypatch.setitem(sys.modules, "agents", sdk)
    monkeypatch.setitem(sys.modules, "examples.openai_agents_sdk", None)  # so that the one with this SDK does not stay
    del sys.modules["examples.openai_agents_sdk"]
    example = importlib.import_module("examples.openai_agents_sdk")
    context = SimpleNamespace(context=train_agent.Programs(7))
    pool_of(monkeypatch, example)
    programs = ("oops", "oops", "1")
    texts = [await example.PYTHON.on_invoke_tool(context, json.dumps({"code": code})) for code in programs]
    assert [example.failed(text) for text in texts] == [True, True, False]
