"""The driver's client with fakes in place of the balancer and the workers; no Ray."""

# pyright: reportPrivateUsage=false

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.balancer_service import BalancerService, Known
from actors.generation import rollout_client
from actors.generation.outbox import NUM_PARTS, Ended, with_refs, without_tokens
from actors.generation.rollout_client import RolloutClient
from actors.remote import Batch
from actors.service import Service
from rstar_ray.agent.journal import TurnJournal, weights_of
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.errors import DeadlineExceeded, RStarError
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.served_weights import WeightsRecord
from rstar_ray.run_dir.trajectory_log import write_trajectories
from rstar_ray.trajectory import Problem, RolloutRequest, StopReason, TrajectorySummary, Turn
from scheduler.records import Cancel, Grant
from tests.fakes import CharChat, Local, adding_problems, registration, request
from tests.rstar_ray import fabricate


class ForgetfulBalancer:
    """Loses what it was given when it restarts."""

    def __init__(self) -> None:
        self.process = "first"
        self.asked: list[str] = []  # what it has learned, and rollouts, in their order
        self.submitted: list[list[str]] = []
        self.payloads: list[RolloutState] = []
        self.came_in = asyncio.Event()
        self.cancelled: list[str] = []

    async def learned(self) -> Known:
        self.asked.append("learned")
        return Known(incarnation=self.process, learned=None)

    async def submit(self, items: list[tuple[Any, Any]]) -> None:
        self.asked.append("submit")
        self.submitted.append([load.rollout_id for load, _ in items])
        self.payloads += [payload for _, payload in items]
        self.came_in.set()

    async def missing(self, rollout_ids: list[str]) -> list[str]:
        return rollout_ids

    async def cancel(self, rollout_ids: list[str]) -> None:
        self.cancelled += rollout_ids

    async def next_submission(self) -> None:
        await asyncio.wait_for(self.came_in.wait(), 60)
        self.came_in.clear()


TRAJECTORY = fabricate.trajectory(adding_problems(1)[0], [("It is 1.", "", None)], reward=1.0)


async def no_loss(name: str, lost: Exception) -> None:
    raise AssertionError(f"{name} was lost") from lost


def summary(rollout_id: str = "r", **changes: Any) -> TrajectorySummary:
    return replace(fabricate.summary(), rollout_id=rollout_id, **changes)


def client_of(balancer: Any, chat: CharChat | None = None, **parts: Any) -> RolloutClient:
    return RolloutClient(Local(balancer), chat or CharChat(), on_replica_lost=no_loss, **parts)


@asynccontextmanager
async def delivering() -> AsyncGenerator[tuple[ForgetfulBalancer, "DeliveringWorker", RolloutClient], None]:
    """A client that follows a worker, until the block ends."""
    balancer, worker = ForgetfulBalancer(), DeliveringWorker()
    client = client_of(balancer)
    client.follow(Service(worker, "generation/0"))
    yield balancer, worker, client
    await client.close()


async def test_what_waited_in_a_balancer_that_died_is_submitted_again():
    balancer = ForgetfulBalancer()
    remote = Local(balancer)
    client = RolloutClient(remote, CharChat(), on_replica_lost=no_loss)  # type: ignore[arg-type]
    requests = [request(problem, rollout_id=f"r{i}") for i, problem in enumerate(adding_problems(3))]

    async def collect() -> None:
        async for _ in client.run(requests):
            pass

    running = asyncio.create_task(collect())
    await balancer.next_submission()
    balancer.process = "second"
    assert remote.on_restart is not None
    remote.on_restart()  # as the watchdog does
    await balancer.next_submission()
    assert balancer.submitted == [["r0", "r1", "r2"]] * 2
    assert balancer.asked == ["submit", "learned", "submit"]  # what it had learned comes first
    running.cancel()
    await client.close()


async def test_an_id_submitted_again_is_refused_since_its_result_would_never_come():
    balancer = ForgetfulBalancer()
    client = client_of(balancer)
    requests = [request(problem, rollout_id="same") for problem in adding_problems(1)]
    first = asyncio.ensure_future(anext(client.run(requests)))
    await balancer.next_submission()
    with pytest.raises(ValueError, match="'same' was submitted before"):
        await anext(client.run(requests))
    first.cancel()
    await client.close()


@pytest.mark.parametrize("name", ["r0", "rl/1/~1/0", "theirs~7"])
async def test_what_is_given_up_may_be_asked_for_again_and_its_late_results_count_for_nothing(name: str):
    async with delivering() as (balancer, worker, client):
        wanted = [request(problem, rollout_id=name) for problem in adding_problems(1)]
        given_up = asyncio.ensure_future(anext(client.run(wanted)))
        await balancer.next_submission()
        given_up.cancel()
        await client.abandon()
        assert balancer.cancelled == [name]
        again = asyncio.ensure_future(anext(client.run(wanted)))
        await balancer.next_submission()
        assert balancer.submitted == [[name], [f"{name}~1"]]
        worker.deliveries.put_nowait(Batch(0, (summary(name), summary(f"{name}~1"))))
        assert await again == FinishedRollout(summary=summary(name), ref=TrajectoryRef("part 1", 0))


async def test_trajectories_are_recorded_under_the_requested_ids_also_after_others_were_given_up(tmp_path: Path):
    async with delivering() as (balancer, worker, client):
        await client.abandon()
        wanted = request(adding_problems(1)[0], rollout_id="stage2/1/0-add/0")
        coming = asyncio.ensure_future(anext(client.run([wanted])))
        await balancer.next_submission()
        running = balancer.payloads[-1].request.rollout_id
        assert running != wanted.rollout_id
        sampled = replace(TRAJECTORY, summary=summary(running))  # as the worker names it
        message, parts = without_tokens(Batch(0, (sampled,)))
        worker.deliveries.put_nowait(message)
        assert (await coming).rollout_id == wanted.rollout_id
        seen = {running: fabricate.seen_tokens(sampled)}  # a learner's rank names it by the trajectory
        write_trajectories(tmp_path / "step.jsonl", parts[0], CharChat().decode, seen=seen, stage="stage2", step=1)
    (row,) = read_rows(tmp_path / "step.jsonl")
    assert row["rollout_id"] == wanted.rollout_id and row["turns"][0]["entropies"]


class CountingChat(CharChat):
    """Says how often it has encoded a prompt."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def prompt_ids(self, problem: Problem) -> list[int]:
        self.encoded.append(problem.id)
        return super().prompt_ids(problem)


async def test_a_prompt_is_encoded_once_and_handed_over_to_every_sibling():
    balancer, chat = ForgetfulBalancer(), CountingChat()
    client = client_of(balancer, chat)
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


def test_a_rank_that_needs_one_trajectory_fetches_little_more_than_that():
    for count in (1, 5, NUM_PARTS, 3 * NUM_PARTS + 1):
        trajectories = [TRAJECTORY] * count
        message, parts = without_tokens(Batch(count, tuple(trajectories)))
        assert len(parts) == NUM_PARTS and max(map(len, parts)) == -(-count // NUM_PARTS)
        refs = [rollout.ref for rollout in with_refs(message.items, parts) if isinstance(rollout, FinishedRollout)]
        assert [ref.batch[ref.index] for ref in refs] == trajectories


class DeliveringWorker:
    """Answers the driver's questions with what the test puts in."""

    def __init__(self) -> None:
        self.deliveries: asyncio.Queue[Batch[Ended]] = asyncio.Queue()
        self.take_finished = self

    def options(self, **asked: Any) -> "DeliveringWorker":
        assert asked == {"num_returns": 1 + NUM_PARTS}
        return self

    def remote(self, wait_s: float, acknowledged: int) -> list[Any]:
        return [self.deliveries.get(), *(f"part {part}" for part in range(NUM_PARTS))]


async def played(ends: list[TrajectorySummary], rewards: list[str]) -> int:
    """How many of these ends the client hands on; each rollout's problem names the reward at its place."""
    balancer, worker = ForgetfulBalancer(), DeliveringWorker()
    client = client_of(balancer)
    client.follow(Service(worker, "generation/0"))
    named = [replace(one, reward=reward) for one, reward in zip(adding_problems(len(ends)), rewards, strict=True)]
    requests = [request(problem, rollout_id=f"r{i}") for i, problem in enumerate(named)]
    worker.deliveries.put_nowait(Batch(0, tuple(replace(end, rollout_id=f"r{i}") for i, end in enumerate(ends))))
    count = 0
    try:
        async for _ in client.run(requests):
            count += 1
    finally:
        await client.close()
    return count


FAILED = summary(reward=0.0, unjudged="judging: --reward.name mine:f: gave None, not a finite number")
CUT = summary(reward=0.0, stop_reason=StopReason.TRUNCATED)


async def test_a_reward_that_has_never_worked_ends_the_run_after_a_few_rollouts():
    with pytest.raises(RStarError, match=r"mine:f: gave None, not a finite number"):
        await played([FAILED, CUT] * 50, [""] * 100)  # of those that are cut nobody asks what they are worth
    with pytest.raises(RStarError, match=r"reward mine:g: .*could be judged"):
        await played([summary(), FAILED] * 50, ["", "mine:g"] * 50)  # another rule's rewards prove nothing


async def test_a_reward_that_has_worked_may_fail_later():
    assert await played([summary(), *[FAILED] * 50], [""] * 51) == 51


async def test_a_delivery_is_taken_apart_into_ends_and_a_rollout_ends_once():
    async with delivering() as (balancer, worker, client):
        requests = [request(problem, rollout_id=f"r{i}") for i, problem in enumerate(adding_problems(3))]
        ends = client.run(requests)
        first = asyncio.ensure_future(anext(ends))
        await balancer.next_submission()
        lost = DroppedRollout(rollout_id="r0", group_id="g", reason="sandbox")
        worker.deliveries.put_nowait(Batch(0, (summary("r1"), summary("r2"))))
        worker.deliveries.put_nowait(Batch(0, (summary("r1"), lost)))
        found = [await first, *[end async for end in ends]]
        assert found == [
            FinishedRollout(summary=summary("r1"), ref=TrajectoryRef("part 0", 0)),
            FinishedRollout(summary=summary("r2"), ref=TrajectoryRef("part 1", 0)),
            lost,
        ]


class RemoteBalancer:
    """A real one behind a handle; keeps the calls that it received."""

    def __init__(self) -> None:
        self.now = BalancerService()
        self.calls: list[tuple[str, Any]] = []
        self.held_up = asyncio.Event()  # questions about lost replicas wait for this
        self.held_up.set()

    def __getattr__(self, name: str) -> Any:
        async def called(*arguments: Any) -> Any:
            if name == "held_by_lost":
                await self.held_up.wait()
            self.calls.append((name, arguments[-1] if arguments else None))
            return await getattr(self.now, name)(*arguments)

        return called

    def sizes(self, name: str) -> list[int]:
        return [len(what) for method, what in self.calls if method == name]


async def grants(balancer: RemoteBalancer, replica: str, count: int = 1) -> list[Grant]:
    """All that are not acknowledged, once there are `count`."""
    async with asyncio.timeout(60):
        while True:
            orders = (await balancer.now.next_orders(replica, 0, 5)).items
            granted = [order for order in orders if isinstance(order, Grant)]
            if len(granted) >= count:
                return granted
            await asyncio.sleep(0)


def training_requests(count: int, step: str = "stage1/1") -> list[RolloutRequest]:
    return [request(problem, rollout_id=f"{step}/{i}") for i, problem in enumerate(adding_problems(count))]


async def register(balancer: RemoteBalancer, *names: str) -> None:
    for name in names:
        await balancer.now.register(registration(name, 100_000, max_running=64, block_tokens=16))


def started(one: RolloutRequest) -> RolloutState:
    return RolloutState.start(one, CharChat().prompt_ids(one.problem))


def write_turns(folder: Path, requests: list[RolloutRequest], versions: Sequence[int] = (0,), weights: int = 0) -> None:
    """One turn of each has finished; `versions` has the version of each of its tokens."""
    journal, count = TurnJournal(folder, "generation/0-life"), len(versions)
    for start in map(started, requests):
        played = replace(
            start, response_ids=[7] * count, loss_mask=[True] * count, logprobs=[0.0] * count,
            policy_versions=list(versions), turns=(Turn(num_tokens=count),),
        )  # fmt: skip
        journal.add(start, played, weights)
    journal.close()


@pytest.mark.parametrize("played_for", ["stage1/1", "stage3/filter/0a1b", "evaluate/stage1/held-out/step-7/0a1b"])
async def test_of_a_lost_replica_what_it_held_is_read_again_and_nothing_else_and_in_batches(
    played_for: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rollout_client, "RETURN_BATCH", 2)
    balancer = RemoteBalancer()
    await register(balancer, "generation/0", "generation/1")
    client = client_of(balancer, journal=tmp_path)
    requests = training_requests(10, played_for)
    first = asyncio.ensure_future(anext(client.run(requests)))
    held = {
        name: {grant.load.rollout_id for grant in await grants(balancer, name)}
        for name in ("generation/0", "generation/1")
    }
    assert all(len(names) == 5 for names in held.values())
    write_turns(tmp_path, requests)  # of both, as far as the other lives and continues
    assert await client.continue_without("generation/0") == 5
    assert balancer.sizes("return_rollouts") == [2, 2, 1]
    assert balancer.sizes("submit") == [10]  # and nothing again
    again = (await grants(balancer, "generation/1", 10))[-5:]
    assert {grant.load.rollout_id for grant in again} == held["generation/0"]
    assert {len(grant.payload.turns) for grant in again} == {1}
    first.cancel()
    await client.close()


async def test_what_had_ended_on_a_lost_replica_before_the_balancer_noticed_is_not_played_again():
    balancer = RemoteBalancer()
    await register(balancer, "generation/0", "generation/1")
    client = client_of(balancer)
    first = asyncio.ensure_future(anext(client.run(training_requests(4))))
    held = [grant.load.rollout_id for grant in await grants(balancer, "generation/0")]
    others = await grants(balancer, "generation/1")
    worker = DeliveringWorker()
    client.follow(Service(worker, "generation/0"))
    worker.deliveries.put_nowait(Batch(0, (DroppedRollout(rollout_id=held[0], group_id="g", reason="any"),)))
    await first
    await client.continue_without("generation/0")
    again = (await balancer.now.next_orders("generation/1", len(others), 5)).items
    played = {order.load.rollout_id for order in again if isinstance(order, Grant)}
    played -= {order.rollout_id for order in again if isinstance(order, Cancel)}
    assert played == {*held[1:]} and (await balancer.now.snapshot()).in_flight == 3
    await client.close()


async def test_a_balancer_that_died_with_a_replica_receives_its_turns_first(tmp_path: Path):
    balancer = RemoteBalancer()
    await register(balancer, "generation/0")
    client = client_of(balancer, journal=tmp_path)
    requests = training_requests(4)
    first = asyncio.ensure_future(anext(client.run(requests)))
    await grants(balancer, "generation/0")
    write_turns(tmp_path, requests[:3])
    balancer.now = BalancerService(settle_s=0.05)
    balancer.held_up.clear()
    losing = asyncio.ensure_future(client.continue_without("generation/0"))
    again = asyncio.ensure_future(client.resubmit())  # as when its new epoch is seen
    await asyncio.sleep(0.05)
    assert not again.done() and balancer.sizes("submit") == [4]
    balancer.held_up.set()
    assert await losing == 3
    await again
    await register(balancer, "generation/0")
    granted = await grants(balancer, "generation/0")
    assert sorted(len(grant.payload.turns) for grant in granted) == [0, 1, 1, 1]
    first.cancel()
    await client.close()


async def test_a_rollout_that_restarted_does_not_go_back_to_a_longer_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    balancer = RemoteBalancer()
    await register(balancer, "generation/0")
    client = client_of(balancer, journal=tmp_path)
    requests = training_requests(1)
    write_turns(tmp_path, requests)
    first = asyncio.ensure_future(anext(client.run(requests)))
    (grant,) = await grants(balancer, "generation/0")
    assert grant.payload.turns
    journal = TurnJournal(tmp_path, "generation/0-later")
    journal.restart(grant.payload.restarted(), 0)
    journal.close()
    (tmp_path / "stage1-step-000001" / "odd.turns").mkdir()
    assert await client.continue_without("generation/0") == 1
    await register(balancer, "generation/1")
    (grant,) = await grants(balancer, "generation/1")
    assert (grant.payload.restarts, grant.payload.turns) == (1, ())
    assert "odd.turns cannot be read" in caplog.text
    first.cancel()
    await client.close()


@pytest.mark.parametrize(("silent_s", "ends"), [(0.0, True), (10.0, False)])
async def test_a_stopped_balancer_is_waited_for_until_the_detector_has_ended_it(
    monkeypatch: pytest.MonkeyPatch, silent_s: float, ends: bool
):
    monkeypatch.setattr(rollout_client, "CALL_DEADLINE_S", 0.05)
    balancer = RemoteBalancer()  # its first replica registers late
    client = client_of(balancer, silent_s=silent_s)
    first = asyncio.ensure_future(anext(client.run(training_requests(1))))
    await asyncio.wait({first}, timeout=0.3)
    assert first.done() == ends
    if ends:
        with pytest.raises(DeadlineExceeded, match=r"driver waited 0\.05 s for balancer"):
            await first
    first.cancel()
    await client.close()


async def test_runs_that_are_open_at_once_get_their_own_ends_and_all_of_them_a_fault():
    async with delivering() as (balancer, worker, client):
        runs = {
            name: client.run([request(problem, rollout_id=name) for problem in adding_problems(1)]) for name in "abc"
        }
        coming = {name: asyncio.ensure_future(anext(run)) for name, run in runs.items()}
        while len(balancer.submitted) < 3:
            await balancer.next_submission()
        worker.deliveries.put_nowait(Batch(0, (summary("b"),)))
        assert (await coming["b"]).rollout_id == "b"
        client._balancer_died(RuntimeError("it is gone"))
        for name in "ac":
            with pytest.raises(RStarError, match="balancer: it is gone"):
                await coming[name]
        later = client.run([request(problem, rollout_id="later") for problem in adding_problems(1)])
        with pytest.raises(RStarError, match="balancer: it is gone"):  # also where the runs before were not awaited
            await anext(later)


async def test_a_resumed_run_keeps_turns_of_all_versions_on_record_up_to_the_one_that_serves(tmp_path: Path):
    checksums = {3: 30, 4: 40, 5: 50}
    served = WeightsRecord(tmp_path, "stage1")
    for step, version in enumerate(checksums):
        served.note(step, version, checksums[version])
    requests = training_requests(4)
    for one, versions in zip(requests, ([3], [3, 4], [4, 5], [4]), strict=True):
        known = weights_of(versions, checksums)
        assert known is not None
        write_turns(tmp_path, [one], versions, known)
    starts = [started(one) for one in requests]
    starts[0] = replace(starts[0], request=replace(requests[0], oldest_version=4))
    for several, version, kept in ((True, 4, [1, 3]), (True, 5, [1, 2, 3]), (False, 4, [3])):
        client = client_of(ForgetfulBalancer(), journal=tmp_path, several_versions=several)
        client.serves(version, checksums[version])
        assert sorted(await client._journaled(starts)) == [requests[index].rollout_id for index in kept]


class SlowBalancer(ForgetfulBalancer):
    """Receives a submission late: `abandon` may cancel its rollouts first."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_for = asyncio.Event()
        self.receives = asyncio.Event()
        self.runs: set[str] = set()

    async def submit(self, items: list[tuple[Any, Any]]) -> None:
        self.asked_for.set()
        await self.receives.wait()
        await super().submit(items)
        self.runs |= {load.rollout_id for load, _ in items}

    async def cancel(self, rollout_ids: list[str]) -> None:
        await super().cancel(rollout_ids)
        self.runs -= set(rollout_ids)


async def test_rollouts_that_are_given_up_during_a_resubmission_do_not_stay_in_the_balancer(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rollout_client, "SUBMIT_BATCH", 2)
    balancer = SlowBalancer()
    balancer.receives.set()
    client = client_of(balancer)
    wanted = [request(problem, rollout_id=f"r{i}") for i, problem in enumerate(adding_problems(5))]
    run = asyncio.ensure_future(anext(client.run(wanted)))
    while len(balancer.runs) < len(wanted):
        await balancer.next_submission()
    balancer.runs.clear()  # the balancer restarts without state
    balancer.submitted.clear()
    balancer.asked_for.clear()
    balancer.receives.clear()
    again = asyncio.ensure_future(client.resubmit())
    await asyncio.wait_for(balancer.asked_for.wait(), 60)
    run.cancel()
    await client.abandon()
    balancer.receives.set()
    await again
    assert balancer.runs == set() and balancer.submitted == [["r0", "r1"]]
    await client.close()
