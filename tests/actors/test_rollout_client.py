"""The driver's client with fakes in place of the balancer and the workers; no Ray."""

import asyncio
from typing import Any

import pytest

from actors.generation import rollout_client
from actors.generation.rollout_client import RolloutClient
from tests.fakes import CharChat, adding_problems, request


class Remote:
    """A method as an actor's handle has it."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class ForgetfulBalancer:
    """Comes back empty, under a new epoch, once it has been asked a few times."""

    def __init__(self) -> None:
        self.pings = 0
        self.submitted: list[list[str]] = []
        self.ping = Remote(self._ping)
        self.submit = Remote(self._submit)

    async def _ping(self) -> str:
        self.pings += 1
        return "first" if self.pings < 3 else "second"

    async def _submit(self, items: list[tuple[Any, Any]]) -> None:
        self.submitted.append([load.rollout_id for load, _ in items])


async def test_what_waited_in_a_balancer_that_died_is_handed_in_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_client, "BALANCER_PING_S", 0.01)
    balancer = ForgetfulBalancer()
    client = RolloutClient(balancer, CharChat(), on_worker_lost=lambda *_: None)
    requests = [request(problem, rollout_id=f"r{i}") for i, problem in enumerate(adding_problems(3))]

    async def collect() -> None:
        async for _ in client.run(requests):
            pass

    running = asyncio.create_task(collect())
    while len(balancer.submitted) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert balancer.submitted == [["r0", "r1", "r2"]] * 2  # once more, and only once
    running.cancel()
    await client.close()


async def test_an_id_handed_in_again_is_refused_since_its_result_would_never_come():
    client = RolloutClient(ForgetfulBalancer(), CharChat(), on_worker_lost=lambda *_: None)
    requests = [request(problem, rollout_id="same") for problem in adding_problems(1)]
    first = asyncio.create_task(anext(client.run(requests)))
    await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="'same' was handed in before"):
        await anext(client.run(requests))
    first.cancel()
    await client.close()
