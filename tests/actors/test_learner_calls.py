"""Calls of the learner's ranks, with fakes in place of actors: what is asked again, what begins again, what ends."""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from actors.health.heartbeat import Heartbeat
from actors.learner import gang
from actors.learner.gang import (
    MAX_LOSSES_IN_A_ROW,
    Learner,
    first_start,
    refuse_changed_rules,
    refuse_differing_rules,
    with_restarts,
)
from actors.learner.policy import RankFacts
from actors.learner.rank_client import Rank, may_pass
from actors.remote import ReplyCache
from actors.service import State
from actors.weights.transfer import Publication
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.config import AlgorithmConfig
from rstar_ray.errors import ConfigError, LearnerError, RankLost, VersionGone
from rstar_ray.run_dir.manifest import WrittenFile
from tests import derived
from tests.logged import logged_lines

# ---------------------------------------------------------------- which failures


@pytest.mark.parametrize(
    "cause",
    [
        TypeError("forward() got an unexpected keyword"),
        ValueError("out of memory of steps"),
        KeyError("layers.0"),
        AssertionError(),
        NotImplementedError("aten::op is not implemented for this device"),
        RecursionError("maximum recursion depth exceeded"),
        OSError(27, "File too large"),
        RayTaskError("pull", "its traceback", ValueError("of another actor"), "generation/0", 1, "10.0.0.1"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_what_would_happen_again_does_not(cause: Exception):
    assert not may_pass(cause)


# ---------------------------------------------------------------- ranks


FACTS = RankFacts(num_parameters=1, max_context_tokens=2, attention_tokens=3.0)


class FakeRank:
    """Counts what it is asked; each call meets what stands first in `meets`."""

    def __init__(self, *meets: Any) -> None:
        self.meets = list(meets)
        self.done: list[str] = []
        self.incarnation = "one"
        self.gone = False
        self.writes: dict[Path, WrittenFile] = {}
        self.call, self.probe, self.written = (_Method(self, name) for name in ("call", "probe", "written"))
        self._kept = {name: ReplyCache() for name in ("call", "written")}

    async def answer(self, name: str, *given: Any) -> Any:
        await asyncio.sleep(0)
        if self.gone:
            raise ActorDiedError()
        if name == "probe":
            return Heartbeat(incarnation=self.incarnation, node_id="node", pid=1, start_time="then")
        meets = self.meets.pop(0) if self.meets else None
        if meets == "unheard":
            raise ActorUnavailableError("the line is cut", None)
        number, *rest = given
        answer = self._kept[name].of(number, lambda: self.work(name, *rest))
        if meets == "unsaid":
            raise ActorUnavailableError("the line is cut", None)
        if meets == "dies":
            self.gone = True
            raise ActorUnavailableError("the line is cut", None)
        if meets == "starts again":
            self.incarnation = "two"
            raise ActorUnavailableError("the line is cut", None)
        if isinstance(meets, Exception):
            raise meets
        if meets is not None:
            await asyncio.sleep(meets)
        return answer

    def work(self, name: str, *rest: Any) -> Any:
        self.done.append(rest[0] if rest else name)
        return self.writes if name == "written" else len(self.done)


class _Method:
    def __init__(self, rank: FakeRank, name: str) -> None:
        self._rank, self._name = rank, name

    def options(self, **_: Any) -> "_Method":
        return self

    def remote(self, *given: Any) -> Any:
        return self._rank.answer(self._name, *given)


def failed(cause: Exception) -> RayTaskError:
    return RayTaskError("call", "its traceback", cause, "learner", 1, "10.0.0.1")


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    handles: list[Any] = []
    monkeypatch.setattr("actors.service.ray.kill", handles.append)
    monkeypatch.setattr(gang, "DEATH_NOTICE_S", 0.2)
    monkeypatch.setattr("actors.learner.rank_client.BLIP_PATIENCE_S", 0.2)
    yield handles


async def learner_of(*ranks: FakeRank, folder: Path = Path("model")) -> Learner:
    learner = Learner(derived.learner(step_deadline_s=5.0, ranks=len(ranks)), folder)
    learner._ranks = [Rank(rank, f"learner/rank-{number}") for number, rank in enumerate(ranks)]
    await asyncio.gather(*(rank.first_heartbeat(5) for rank in learner._ranks))
    return learner


@pytest.mark.parametrize("blip", ["unheard", "unsaid"])
async def test_a_rank_that_answers_again_is_asked_again_and_does_nothing_twice(blip: str, killed: list[Any]):
    ranks = FakeRank(blip, blip), FakeRank()
    learner = await learner_of(*ranks)
    await learner.set_policy(Path("p"))
    await learner.reset_optimizer()
    assert [rank.done for rank in ranks] == [["set_policy", "reset_optimizer"]] * 2
    assert killed == []


async def test_a_call_that_is_repeated_after_another_ones_reply_is_done_once():
    rank = FakeRank("unsaid")
    learner = await learner_of(rank)
    await asyncio.gather(learner.reset_optimizer(), learner.set_policy(Path("p")))
    assert rank.done == ["reset_optimizer", "set_policy"]


class Trains(FakeRank):
    """Publishes, and applies updates or refuses them."""

    applies = True

    def work(self, name: str, *rest: Any) -> Any:
        super().work(name, *rest)
        if rest[0] == "publish":
            return Publication(policy_version=rest[1][0], num_bytes=1)
        return UpdateResult(applied=self.applies, reason="", step=1, metrics={})


async def test_a_version_is_stored_again_until_an_update_has_changed_the_weights():
    rank = Trains()
    learner = await learner_of(rank)
    learner._facts = SimpleNamespace(attention_tokens=math.inf)
    example = SftExample(np.arange(3, dtype=np.int32), np.ones(3, np.bool_))
    await learner.publish(4)
    rank.applies = False
    _, stored = await asyncio.gather(learner.train_sft([example], 1e-3), learner.store_again(4))
    assert stored.policy_version == 4
    rank.applies = True
    updated, stored = await asyncio.gather(
        learner.train_sft([example], 1e-3), learner.store_again(4), return_exceptions=True
    )
    assert isinstance(updated, UpdateResult) and isinstance(stored, VersionGone)
    assert rank.done == ["publish", "train_sft", "publish", "train_sft"]  # the ranks gather nothing in vain


@pytest.mark.parametrize("end", ["dies", "starts again"])
async def test_a_rank_that_does_not_or_as_another_is_lost_and_so_are_all(end: str, killed: list[Any]):
    learner = await learner_of(FakeRank(), FakeRank(end))
    with pytest.raises(RankLost, match="learner/rank-1 died during loading weights"):
        await learner.set_policy(Path("p"))
    assert len(killed) == 2
    with pytest.raises(RankLost, match="not running"):
        await learner.set_policy(Path("p"))


async def test_of_a_broken_connection_and_the_death_behind_it_the_death_is_reported():
    broken = failed(RuntimeError("[gloo] Connection closed by peer"))
    learner = await learner_of(FakeRank(broken), FakeRank("dies"), FakeRank(60))
    with pytest.raises(RankLost, match="learner/rank-1 died"):
        await learner.set_policy(Path("p"))


# ---------------------------------------------------------------- starts


class New(FakeRank):
    """A rank that starts: it stands still at one named method, and meets the given failure in another."""

    def __init__(self, *, stops_at: str = "", fails_at: str = "", failure: Exception | None = None) -> None:
        super().__init__()
        self.stops_at, self.fails_at, self.failure = stops_at, fails_at, failure
        self.killed = asyncio.Event()

    async def answer(self, name: str, *given: Any) -> Any:
        method = given[1] if name == "call" else name
        if method == self.stops_at:
            await self.killed.wait()
            raise ActorDiedError()
        if method == self.fails_at and self.failure is not None:
            raise self.failure
        reply = await super().answer(name, *given)
        return {"address": ("10.0.0.1", 1), "probe": reply, "start": FACTS}.get(method)


class KillsTheSilent:
    """A watchdog that kills at once what does not answer."""

    def __init__(self) -> None:
        self.starting: dict[str, float] = {}  # and how long they may be silent
        self.serving: list[str] = []

    def follow(self, rank: Rank) -> None:
        if rank.state is State.SERVING:
            self.serving.append(rank.name)
            return
        self.starting[rank.name] = rank.silent_s
        if rank.handle.stops_at:
            rank.handle.killed.set()

    def leave(self, rank: Rank) -> None: ...


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A learner of two ranks, which are made of these, start by start; its start may take `seconds`."""

    def learner(*ranks: New, seconds: float = 5.0) -> Learner:
        made = iter(ranks)

        def start_rank(_: Any, __: Any, number: int, *, silent_s: float, **___: Any) -> Rank:
            return Rank(next(made), gang.rank_name(number), silent_s=silent_s)

        monkeypatch.setattr(gang, "start_rank", start_rank)
        monkeypatch.setattr(gang.ray.util, "list_named_actors", lambda: [])
        config = derived.learner(start_deadline_s=seconds, ranks=2)
        return Learner(config, Path("model"), watchdog=KillsTheSilent(), silent_s=7.0)  # type: ignore[arg-type]

    return learner


async def lost_once(learner: Learner) -> list[str]:
    """What a person sees of a stage that loses the learner once, and then is done."""
    stages = iter([RankLost("learner/rank-0 died"), None])
    await learner.start()

    async def stage() -> None:
        if (lost := next(stages)) is not None:
            raise lost

    with logged_lines() as lines:
        await with_restarts(stage, restart=learner.restart, since=lambda: "step 7")
    return lines[1:]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_stopped_before_its_first_answer_in_a_restart_is_a_loss_like_another(
    rank: int, started: Any, killed: list[Any]
):
    stopped = [New(stops_at="probe" if number == rank else "") for number in range(2)]
    learner = started(New(), New(), *stopped, New(), New(), seconds=1)
    (line,) = await lost_once(learner)
    assert line.startswith(f"driver waited 0.5 s for learner/rank-{rank} (its first answer) and gave up; the learner")
    assert set(stopped) <= set(killed) and learner._watchdog.serving == ["learner/rank-0", "learner/rank-1"] * 2


@pytest.mark.parametrize(("method", "reason"), [("address", "its address"), ("start", "loading the model")])
async def test_a_rank_that_is_stopped_while_the_gang_starts_again_is_ended_by_the_detector_and_is_a_loss(
    method: str, reason: str, started: Any
):
    learner = started(New(), New(), New(stops_at=method), New(), New(), New())
    (line,) = await lost_once(learner)
    assert line.startswith(f"learner/rank-0 died during {reason}; the learner starts again")
    assert learner._watchdog.starting == {"learner/rank-0": 7.0, "learner/rank-1": 7.0}


async def test_ranks_whose_names_ray_does_not_free_in_time_are_a_loss(started: Any, monkeypatch: pytest.MonkeyPatch):
    learner = started()
    monkeypatch.setattr(gang, "CLOSE_DEADLINE_S", 0.05)
    monkeypatch.setattr(gang.ray.util, "list_named_actors", lambda: ["learner/rank-1"])
    with pytest.raises(RankLost, match=r"waited 0\.05 s for learner \(the end of its ranks\)"):
        await learner.restart()


@pytest.mark.parametrize("method", ["probe", "start"])
async def test_ranks_of_which_one_is_killed_in_a_runs_first_start_are_started_again(
    method: str, started: Any, logged: list[str]
):
    learner = started(New(), New(fails_at=method, failure=ActorDiedError()), New(), New())
    await first_start(learner)
    (line,) = logged
    assert line.startswith("learner/rank-1 died during") and line.endswith(
        "the learner starts again from the start of the run"
    )
    assert learner._watchdog.serving == ["learner/rank-0", "learner/rank-1"]


async def test_ranks_that_die_in_every_first_start_end_the_run(started: Any):
    dies = [New(fails_at="start", failure=ActorDiedError()) for _ in range(2 * (1 + MAX_LOSSES_IN_A_ROW))]
    with pytest.raises(LearnerError, match=f"{1 + MAX_LOSSES_IN_A_ROW} losses since the start of the run"):
        await first_start(started(*dies))


@pytest.mark.parametrize(
    ("at", "refusal", "message"),
    [
        ("start", RayTaskError("call", "", ConfigError("--model", "no model", "give one"), "l", 1, "h"), "--model"),
        ("start", RayTaskError("call", "", torch.OutOfMemoryError("20 GiB"), "l", 1, "h"), "failed in loading the mod"),
        ("probe", ActorDiedError(RayTaskError("__init__", "E: no torch", ImportError(), "l", 1, "h")), "no torch"),
    ],
    ids=["refuses", "has no memory", "is not made"],
)
async def test_what_a_rank_refuses_or_meets_in_a_runs_first_start_ends_it_at_once(
    at: str, refusal: Exception, message: str, started: Any, logged: list[str]
):
    with pytest.raises((LearnerError, ConfigError), match=message):
        await first_start(started(New(fails_at=at, failure=refusal), New()))
    assert logged == []


# ---------------------------------------------------------------- what is on disk


def part(folder: Path, name: str, rank: int) -> dict[Path, WrittenFile]:
    (folder / name).write_text("weights")
    return {folder / name: WrittenFile(num_bytes=7, sha256="0", by=f"learner/rank-{rank}")}


async def test_what_ranks_wrote_that_are_gone_by_now_is_not_a_checkpoint(tmp_path: Path):
    learner = await learner_of(FakeRank(), FakeRank())
    await learner.save_checkpoint(tmp_path)
    learner._rank_died("learner/rank-1", ActorDiedError())
    with pytest.raises(RankLost, match="not running"):
        await learner.written()


async def test_a_checkpoint_is_not_written_while_a_ranks_part_is_missing(tmp_path: Path):
    ranks = FakeRank(), FakeRank()
    learner = await learner_of(*ranks)
    await learner.save_checkpoint(tmp_path / "step-1")
    (tmp_path / "step-1").mkdir()
    ranks[0].writes = part(tmp_path / "step-1", "state-0", 0)
    with pytest.raises(RankLost, match="learner/rank-1 has not written its part of step-1"):
        await learner.written()
    await learner.save_checkpoint(tmp_path / "step-1")
    ranks[1].writes = part(tmp_path / "step-1", "state-1", 1)
    assert len(await learner.written()) == 2


async def test_what_was_written_is_reported_again_where_the_reply_was_lost(tmp_path: Path):
    rank = FakeRank()
    learner = await learner_of(rank)
    await learner.save_checkpoint(tmp_path)
    rank.meets, rank.writes = ["unsaid"], part(tmp_path, "state-0", 0)
    assert list(await learner.written()) == [tmp_path / "state-0"]
    assert rank.done == ["save_checkpoint", "written"]


# ---------------------------------------------------------------- a real line

BLIPS = """
import asyncio, ray
from types import SimpleNamespace
from actors.learner.rank_client import Rank
from actors.remote import ReplyCache

@ray.remote(concurrency_groups={"probe": 1})
class Counts:
    def __init__(self):
        self.kept, self.done = ReplyCache(), 0

    @ray.method(concurrency_group="probe")
    def probe(self):
        return SimpleNamespace(incarnation="one")

    def call(self, number, method, arguments):
        return self.kept.of(number, getattr(self, method))

    def work(self):
        self.done += 1
        return self.done

async def main():
    rank = Rank(Counts.remote(), "learner/rank-0")
    await rank.first_heartbeat(60)
    print([await rank.call_once(lambda one: one.work(), deadline_s=60, reason="an update") for _ in range(20)])

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
asyncio.run(main())
ray.shutdown()
"""


@pytest.mark.real
@pytest.mark.slow
def test_over_a_line_that_loses_questions_and_answers_every_call_is_done_once():
    loses = {"num_failures": 10, "req_failure_prob": 25, "resp_failure_prob": 25}  # percent
    broken = json.dumps({"CoreWorkerService.grpc_client.PushTask": loses})
    environment = {**os.environ, "RAY_testing_rpc_failure": broken}
    command = [sys.executable, "-c", BLIPS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert str(list(range(1, 21))) in ended.stdout, ended.stderr
    assert "was unreachable and answers again" in ended.stderr


def test_rules_that_differ_between_ranks_are_refused_by_the_name_of_their_module():
    facts = [replace(FACTS, own_rules={"mine": digest}) for digest in ("a", "a", "b")]
    algorithm = AlgorithmConfig(loss="mine:loss")
    refuse_differing_rules(facts[:2], algorithm)
    with pytest.raises(ConfigError, match=r"mine:loss: mine differs between learner/rank-2 and learner/rank-0"):
        refuse_differing_rules(facts, algorithm)


def test_rules_that_have_changed_when_ranks_restart_are_refused():
    first, second = (replace(FACTS, own_rules={"mine": digest}) for digest in ("a", "b"))
    refuse_changed_rules(first, first, AlgorithmConfig(loss="mine:loss"))
    with pytest.raises(ConfigError, match=r"mine:loss: mine has changed since the run was started"):
        refuse_changed_rules(first, second, AlgorithmConfig(loss="mine:loss"))
