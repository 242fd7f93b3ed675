"""The life cycle of a service, with fakes in place of actors: its start, its losses, its end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from actors import remote, service
from actors.learner.gang import MAX_LOSSES_IN_A_ROW, with_restarts
from actors.service import LossBudget, Service, State
from actors.tool_host import hosts_up
from rstar_ray.errors import DeadlineExceeded, LearnerError, RankLost, RStarError, SandboxError

RESTARTS = ActorUnavailableError("it restarts", None)


class Actor:
    """Each of its processes answers, is silent, or raises; a kill begins the next."""

    def __init__(self, *processes: Any) -> None:
        self.processes = list(processes)
        self.num_killed = 0
        self.probe, self.start = SimpleNamespace(remote=self._probe), SimpleNamespace(remote=self._start)
        self.close = SimpleNamespace(remote=self._close)
        self.probes = False  # answers probes while it is late
        self.closed = False

    async def _start(self) -> Any:
        found = self.processes[0]
        if isinstance(found, ActorUnavailableError):
            self.processes.pop(0)
        if isinstance(found, Exception):
            raise found
        if found == "silent":
            await asyncio.Event().wait()
        return found

    async def _probe(self) -> Any:
        if isinstance(self.processes[0], Exception):
            raise self.processes[0]
        if not self.probes:
            await asyncio.Event().wait()
        return SimpleNamespace(incarnation="one")

    async def _close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.num_killed += 1
        self.processes.pop(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.ray, "kill", lambda actor, no_restart=True: actor.kill())
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(service, "LATE_PATIENCE_S", 0.05)


async def up(actor: Actor, deadline_s: float = 0.5) -> Any:
    started = Service[Any](actor, "sandbox/0")
    return await started.first_answer(lambda a: a.start(), deadline_s=deadline_s, reason="its pool")


async def test_a_process_that_dies_in_the_first_start_is_waited_for_until_ray_has_started_the_next():
    actor = Actor(RESTARTS, RESTARTS, "up")
    assert await up(actor, 60.0) == "up"
    assert actor.num_killed == 0


async def test_a_process_that_is_stopped_before_its_first_answer_is_killed_once(logged: list[str]):
    actor = Actor("silent", "up")
    assert await up(actor) == "up"
    (line,) = logged
    assert actor.num_killed == 1 and "sandbox/0 did not start, silent for 0.5 s" in line
    with pytest.raises(DeadlineExceeded):
        await up(Actor("silent", "silent", "up"))


async def test_a_process_that_answers_probes_and_is_merely_late_is_not_killed():
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
    ids=["refuses", "missed a deadline itself", "is gone for good"],
)
async def test_a_refusal_ends_the_first_start_at_once(refusal: Exception):
    actor = Actor(refusal, "up")
    with pytest.raises((RayTaskError, ActorDiedError)):
        await up(actor)
    assert actor.num_killed == 0


async def test_a_host_that_cannot_load_its_tool_ends_the_run_with_its_name():
    with pytest.raises(RStarError, match="tools/mine/0 did not start"):
        await hosts_up({"tools/mine/0": Service(Actor(ActorDiedError()), "tools/mine/0")})


async def test_a_service_goes_through_its_states_and_says_how_long_it_served():
    actor = Actor("up")
    actor.probes = True
    found = Service[Any](actor, "generation/0")
    assert found.state is State.STARTING and found.lost() == 0.0
    await found.connect(5)
    found.serves()
    await asyncio.sleep(0.01)
    assert found.state is State.SERVING and await found.same_process(5)
    assert 0 < found.lost() < 60 and found.state is State.LOST
    await found.close(5)
    assert not actor.closed  # a lost process cleans up nothing
    found.serves()
    await found.close(5)
    found.end()
    assert actor.closed and actor.num_killed == 1


def test_losses_count_while_there_is_no_progress_in_between():
    losses = LossBudget(2)
    exceeded = list[bool]()
    for progress in (0, 0, 0, 1, 1, 2):
        losses.count(progress)
        exceeded.append(losses.exceeded)
    assert exceeded == [False, False, True, False, False, False]


class Stage:
    """Saves a checkpoint after each step; loses the learner in the given calls and restarts."""

    def __init__(self, losses: list[int], restarts_lost: int = 0) -> None:
        self.losses = losses  # steps saved when each of the first calls is lost
        self.restarts_lost = restarts_lost
        self.saved = 0
        self.calls: list[str] = []

    async def run(self) -> str:
        self.calls.append("stage")
        if self.losses:
            self.saved = self.losses.pop(0)
            raise RankLost("learner/rank-0 died")
        return "done"

    async def restart(self) -> None:
        self.calls.append("restart")
        if self.restarts_lost:
            self.restarts_lost -= 1
            raise RankLost("learner/rank-1 died")

    async def until_done(self) -> str:
        since = lambda: f"the checkpoint of step {self.saved}"  # noqa: E731
        return await with_restarts(self.run, restart=self.restart, since=since)


@pytest.mark.parametrize("lost_again", [0, 1])
async def test_after_a_loss_the_learner_starts_again_and_then_the_stage_and_a_loss_in_that_counts_like_another(
    lost_again: int, logged: list[str]
):
    stage = Stage([4], restarts_lost=lost_again)
    assert await stage.until_done() == "done"
    assert stage.calls == ["stage", "restart", *["restart"] * lost_again, "stage"]
    assert logged[0] == "learner/rank-0 died; the learner starts again from the checkpoint of step 4"
    assert len(logged) == 1 + lost_again


async def test_any_number_of_losses_is_tolerated_while_checkpoints_come_in_between():
    assert await Stage([*range(1, 30)]).until_done() == "done"


async def test_losses_at_the_same_checkpoint_end_the_run():
    with pytest.raises(LearnerError, match=f"{MAX_LOSSES_IN_A_ROW + 1} losses since the checkpoint of step 7"):
        await Stage([7] * 30).until_done()


async def test_other_faults_of_the_learner_end_the_run_at_once():
    class Diverged(Stage):
        async def run(self) -> str:
            raise LearnerError("3 updates in a row were not finite")

    with pytest.raises(LearnerError, match="not finite"):
        await Diverged([]).until_done()
