"""The adapters of other libraries' environments, played as a tool host plays them, against fakes of these libraries."""

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rstar_ray.data.problems import load_problems
from rstar_ray.outcome import Outcome
from rstar_ray.tools.host import HostAnswer, HostCall, ToolHost
from rstar_ray.tools.loader import check_environment, load_environment
from rstar_ray.trajectory import Problem, StopReason, ToolMemory

FOLDER = str(Path(__file__).resolve().parents[2] / "examples")


class Space:
    def contains(self, action: int) -> bool:
        return action < 4

    def __str__(self) -> str:
        return "Discrete(4)"


class Corridor:
    """Three steps of action 2 from a place given by the seed lead to the end."""

    action_space = Space()

    def reset(self, *, seed: int) -> None:
        self.place = seed

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += action == 2
        return self.place, 0.5 * (self.place == 3), self.place == 3, False, {}

    def render(self) -> str:
        return f"\x1b[41m{self.place}\x1b[0m of 3\n"

    def close(self) -> None: ...


@pytest.fixture
def gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("gymnasium")
    module.make = lambda name, render_mode: Corridor()
    monkeypatch.setitem(sys.modules, "gymnasium", module)
    monkeypatch.syspath_prepend(FOLDER)


async def say(entry: str, problem: Problem, said: str, memory: ToolMemory | None, host: ToolHost | None = None) -> Any:
    host = host or ToolHost(environment=load_environment(entry))
    return await host.call(
        HostCall(arguments={"said": said}, rollout_id="r", holder="w", problem=problem, memory=memory)
    )


@pytest.mark.usefixtures("gymnasium")
async def test_a_gymnasium_environment_is_played_and_survives_the_loss_of_its_host(tmp_path: Path):
    check_environment("gym_text:Gym", FOLDER)
    row = {"id": "1", "problem": "1 of 3", "environment": "gym_text:Gym", "game": "Corridor-v0", "seed": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (problem,) = load_problems(tmp_path / "rows.jsonl", integer_answers=True)
    memory: ToolMemory | None = None
    answers: list[HostAnswer] = []
    for said in ("to the right", "I take 7", "I take 2", "2"):  # each at a new host
        answers.append(await say("gym_text:Gym", problem, said, memory))
        memory = answers[-1].memory
    assert [one.outcome for one in answers] == [Outcome.OK] * 4
    assert [one.text for one in answers[:3]] == [*["Write the number of an action: Discrete(4)."] * 2, "2 of 3"]
    assert answers[3].reward == 0.5


@asynccontextmanager
async def counting_server() -> AsyncGenerator[str, None]:
    """Speaks OpenEnv's protocol: counts the words said, gives 1 for each step and is done at three."""

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket, words = web.WebSocketResponse(), 0
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "reset":
                words = asked["data"]["words"]
            elif asked["data"]["text"] == "leave":
                await socket.close()
                break
            elif asked["data"]["text"] == "break":
                await socket.send_json({"type": "error", "data": {"message": "no such word"}})
                continue
            else:
                words += 1
            step = asked["type"] == "step"
            data = {"observation": {"said": f"{words} words"}, "reward": 1.0 if step else None, "done": words >= 3}
            await socket.send_json({"type": "observation", "data": data})
        return socket

    app = web.Application()
    app.add_routes([web.get("/ws", serve)])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/").replace("http", "ws")


async def test_a_remote_openenv_server_is_played_and_its_failures_are_not_the_policys(monkeypatch: pytest.MonkeyPatch):
    check_environment("openenv_remote:Remote", FOLDER)
    monkeypatch.syspath_prepend(FOLDER)
    entry = "openenv_remote:Remote"
    async with counting_server() as url:
        metadata = {"url": url, "field": "text", "reset": {"words": 1}}
        problem = Problem(id="1", problem="Say.", answer="", metadata=metadata)
        host = ToolHost(environment=load_environment(entry))
        first = await say(entry, problem, "one", None, host)
        last = await say(entry, problem, "two", first.memory, host)
        assert (first.text, last.reward) == ("2 words", 2.0)
        cut = ToolHost(environment=load_environment(entry))
        first = await say(entry, problem, "one", None, cut)
        ended = HostCall(
            arguments={},
            rollout_id="r",
            holder="w",
            problem=problem,
            memory=first.memory,
            ended=StopReason.MAX_TURNS,
        )
        assert (await cut.call(ended)).reward == 1.0
        for said in ("leave", "break"):
            gone = ToolHost(environment=load_environment(entry))
            assert "OpenEnv server" in (await say(entry, problem, said, None, gone)).fault
            await gone.close()
        for one in (host, cut):
            await one.close()
    refused = await say(entry, problem, "one", None)
    assert "does not answer" in refused.fault
