"""The driver's client with fakes in place of the balancer and the workers; no Ray."""

import asyncio
from typing import Any

import pytest

from actors.balancer import Sign
from actors.generation import rollout_client
from actors.generation.delivery import NUM_PARTS, Delivery, FinishedAt, in_parts
from actors.generation.rollout_client import RolloutClient
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef
from rstar_ray.trajectory import Problem
from tests.fakes import CharChat, adding_problems, request, summary


class Remote:
    """A method as an actor's handle has it."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class ForgetfulBalancer:
    """Comes back empty, under a new epoch, once it has been asked a few times."""

    def __init__(self) -> None:
        self.signs = 0
        self.submitted: list[list[str]] = []
        self.payloads: list[RolloutState] = []
        self.came_in = asyncio.Event()
        self.sign = Remote(self._sign)
        self.submit = Remote(self._submit)
        self.cancelled: list[str] = []
        self.cancel = Remote(self._cancel)

    async def _sign(self) -> Sign:
        self.signs += 1
        lines = ("r0 is set aside",) if self.signs == 2 else ()
        return Sign(epoch="first" if self.signs < 3 else "second", lines=lines)

    async def _submit(self, items: list[tuple[Any, Any]]) -> None:
        self.submitted.append([load.rollout_id for load, _ in items])
        self.payloads += [payload for _, payload in items]
        self.came_in.set()

    async def _cancel(self, rollout_ids: list[str]) -> None:
        self.cancelled += rollout_ids

    async def next_submission(self) -> None:
        await asyncio.wait_for(self.came_in.wait(), 10)
        self.came_in.clear()


async def test_what_waited_in_a_balancer_that_died_is_handed_in_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_client, "BALANCER_PING_S", 0.01)
    balancer = ForgetfulBalancer()
    shown: list[str] = []
    client = RolloutClient(balancer, CharChat(), on_worker_lost=lambda *_: None, show=shown.append)
    requests = [request(problem, rollout_id=f"r{i}") for i, problem in enumerate(adding_problems(3))]

    async def collect() -> None:
        async for _ in client.run(requests):
            pass

    running = asyncio.create_task(collect())
    for _ in range(2):
        await balancer.next_submission()
    signs = balancer.signs
    while balancer.signs < signs + 3:  # and it is asked for a sign again and again
        await asyncio.sleep(0)
    assert balancer.submitted == [["r0", "r1", "r2"]] * 2  # once more, and only once
    assert shown == ["r0 is set aside"]
    running.cancel()
    await client.close()


async def test_an_id_handed_in_again_is_refused_since_its_result_would_never_come():
    balancer = ForgetfulBalancer()
    client = RolloutClient(balancer, CharChat(), on_worker_lost=lambda *_: None)
    requests = [request(problem, rollout_id="same") for problem in adding_problems(1)]
    first = asyncio.ensure_future(anext(client.run(requests)))
    await balancer.next_submission()
    with pytest.raises(ValueError, match="'same' was handed in before"):
        await anext(client.run(requests))
    first.cancel()
    await client.close()


async def test_what_is_given_up_may_be_asked_for_again_and_its_late_results_count_for_nothing():
    balancer, worker = ForgetfulBalancer(), DeliveringWorker()
    client = RolloutClient(balancer, CharChat(), on_worker_lost=lambda *_: None)
    client.follow("generation/0", worker, "its life")
    wanted = [request(problem, rollout_id="r0") for problem in adding_problems(1)]
    given_up = asyncio.ensure_future(anext(client.run(wanted)))
    await balancer.next_submission()
    given_up.cancel()
    await client.abandon()
    assert balancer.cancelled == ["r0"]
    again = asyncio.ensure_future(anext(client.run(wanted)))
    await balancer.next_submission()
    assert balancer.submitted == [["r0"], ["r0~1"]]
    late, new = (FinishedAt(summary=summary(name), index=index) for index, name in enumerate(("r0", "r0~1")))
    worker.deliveries.put_nowait(Delivery(finished=(late, new)))
    assert await again == FinishedRollout(summary=summary("r0"), ref=TrajectoryRef("part 1", 0))
    await client.close()


class CountingChat(CharChat):
    """Says how often it has encoded a prompt."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def prompt_ids(self, problem: Problem) -> list[int]:
        self.encoded.append(problem.id)
        return super().prompt_ids(problem)


async def test_a_prompt_is_encoded_once_and_handed_over_to_every_sibling():
    balancer, chat = ForgetfulBalancer(), CountingChat()
    client = RolloutClient(balancer, chat, on_worker_lost=lambda *_: None)
    problems = adding_problems(2)
    requests = [request(problem, rollout_id=f"{problem.id}/{i}") for problem in problems for i in range(8)]
    running = asyncio.ensure_future(anext(client.run(requests)))
    await balancer.next_submission()
    assert chat.encoded == [problem.id for problem in problems]
    assert [payload.prompt_ids for payload in balancer.payloads] == [
        CharChat().prompt_ids(problem) for problem in problems for _ in range(8)
    ]
    assert len({id(payload.prompt_ids) for payload in balancer.payloads}) == 2  # so that a message holds it once
    running.cancel()
    await client.close()


async def test_problems_of_two_sets_that_are_numbered_alike_have_prompts_of_their_own():
    balancer = ForgetfulBalancer()
    client = RolloutClient(balancer, CharChat(), on_worker_lost=lambda *_: None)
    problems = [Problem(id="1", problem="1+1", answer="2"), Problem(id="1", problem="3+4", answer="7")]
    requests = [request(problem, rollout_id=f"set-{number}/1") for number, problem in enumerate(problems)]
    running = asyncio.ensure_future(anext(client.run(requests)))
    await balancer.next_submission()
    assert [payload.prompt_ids for payload in balancer.payloads] == [CharChat().prompt_ids(each) for each in problems]
    running.cancel()
    await client.close()


def test_a_rank_that_needs_one_trajectory_fetches_little_more_than_that():
    for count in (1, 5, NUM_PARTS, 3 * NUM_PARTS + 1):
        trajectories: Any = [f"trajectory {number}" for number in range(count)]
        parts = in_parts(trajectories)
        assert len(parts) == NUM_PARTS and max(map(len, parts)) == -(-count // NUM_PARTS)
        places = [FinishedAt(summary=summary(), index=number).place for number in range(count)]
        assert [parts[part][position] for part, position in places] == trajectories


class DeliveringWorker:
    """Answers the driver's questions with what the test puts in."""

    def __init__(self) -> None:
        self.deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self.take_finished = self

    def options(self, **asked: Any) -> "DeliveringWorker":
        assert asked == {"num_returns": 1 + NUM_PARTS}
        return self

    def remote(self, wait_s: float, acknowledged: int) -> list[Any]:
        return [self.deliveries.get(), *(f"part {part}" for part in range(NUM_PARTS))]


async def test_a_delivery_is_taken_apart_into_ends_and_a_rollout_ends_once():
    balancer, worker = ForgetfulBalancer(), DeliveringWorker()
    client = RolloutClient(balancer, CharChat(), on_worker_lost=lambda *_: None)
    client.follow("generation/0", worker, "its life")
    requests = [request(problem, rollout_id=f"r{i}") for i, problem in enumerate(adding_problems(3))]
    ends = client.run(requests)
    first = asyncio.ensure_future(anext(ends))
    await balancer.next_submission()
    twice = FinishedAt(summary=summary("r1"), index=0)
    lost = DroppedRollout(rollout_id="r0", group_id="g", reason="sandbox")
    worker.deliveries.put_nowait(Delivery(finished=(twice, FinishedAt(summary=summary("r2"), index=1))))
    worker.deliveries.put_nowait(Delivery(finished=(twice,), dropped=(lost,)))
    found = [await first, *[end async for end in ends]]
    assert found == [
        FinishedRollout(summary=summary("r1"), ref=TrajectoryRef("part 0", 0)),
        FinishedRollout(summary=summary("r2"), ref=TrajectoryRef("part 1", 0)),
        lost,
    ]
    await client.close()
