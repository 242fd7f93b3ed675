"""Executors and hosts of tools in a run's first start, with fakes in place of actors: who dies, is stopped, refuses."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from actors import remote, system, tool_host
from actors.remote import Remote
from actors.system import TrainingActors
from rstar_ray.errors import DeadlineExceeded, RStarError, SandboxError

DEADLINE_S = 0.5
UpFn = Callable[[Any], Awaitable[Any]]


class Actor:
    """Each of its lives answers, is silent, or meets what it is told to; being killed begins the next."""

    def __init__(self, *lives: Any) -> None:
        self.lives = list(lives)
        self.num_killed = 0
        self.probe, self.start, self.pid = (
            SimpleNamespace(remote=self._probe),
            *[SimpleNamespace(remote=self._up)] * 2,
        )
        self.probes = False  # answers while it is late

    async def _up(self) -> Any:
        meets = self.lives[0]
        if isinstance(meets, ActorUnavailableError):
            self.lives.pop(0)  # Ray starts it again
        if isinstance(meets, Exception):
            raise meets
        if meets == "silent":
            await asyncio.Event().wait()
        return meets

    async def _probe(self) -> Any:
        if not self.probes:
            await asyncio.Event().wait()
        return SimpleNamespace(life="one")

    def kill(self) -> None:
        self.num_killed += 1
        self.lives.pop(0)


async def executor_up(actor: Actor) -> Any:
    whole = SimpleNamespace(_executors={"sandbox/0": Remote(actor, "sandbox/0")})
    (level,) = await TrainingActors._executors_up(whole)  # type: ignore[arg-type]
    return level


async def host_up(actor: Actor) -> Any:
    return await tool_host.hosts_up({"tools/mine/0": Remote(actor, "tools/mine/0")})


@pytest.fixture(params=[executor_up, host_up])
def up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> UpFn:
    monkeypatch.setattr(remote.ray, "kill", lambda actor, no_restart: actor.kill())
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(remote, "LOOK_S", 0.05)
    monkeypatch.setattr(system, "START_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(tool_host, "START_S", DEADLINE_S)
    return request.param


async def test_one_that_dies_while_it_starts_is_waited_for_until_ray_has_started_it_again(
    up: UpFn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(system, "START_DEADLINE_S", 60.0)
    monkeypatch.setattr(tool_host, "START_S", 60.0)
    dies = ActorUnavailableError("it restarts", None)
    actor = Actor(dies, dies, "up")
    await up(actor)
    assert actor.num_killed == 0


async def test_one_that_is_stopped_before_its_first_answer_is_ended_once_and_another_waited_for(
    up: UpFn, logged: list[str]
):
    actor = Actor("silent", "up")
    await up(actor)
    (line,) = logged
    assert actor.num_killed == 1 and "did not come up, silent for 0.5 s" in line
    with pytest.raises(DeadlineExceeded):
        await up(Actor("silent", "silent", "up"))


async def test_one_that_is_there_and_merely_late_is_not_killed(up: UpFn):
    actor = Actor("silent")
    actor.probes = True
    with pytest.raises(DeadlineExceeded):
        await up(actor)
    assert actor.num_killed == 0


@pytest.mark.parametrize(
    "refusal",
    [
        RayTaskError("start", "its traceback", SandboxError("no level"), "sandbox", 1, "host"),
        RayTaskError("start", "", DeadlineExceeded("a", "b", "c", 1), "sandbox", 1, "host").as_instanceof_cause(),
        ActorDiedError(),
    ],
    ids=["refuses", "waited itself", "is gone for good"],
)
async def test_one_that_refuses_or_is_gone_for_good_ends_it_at_once(up: UpFn, refusal: Exception):
    actor = Actor(refusal, "up")
    with pytest.raises((RayTaskError, ActorDiedError, RStarError)):
        await up(actor)
    assert actor.num_killed == 0
