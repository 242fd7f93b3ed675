"""Calls of the learner's ranks, with fakes in place of actors: what is asked again, what begins again, what ends."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectStoreFullError, RayTaskError

from actors.learner import gang
from actors.learner.calls import CalledRank, KeptAnswer, may_pass
from actors.learner.gang import Learner
from rstar_ray.errors import LearnerError, RankLost
from rstar_ray.run_dir.manifest import WrittenFile
from tests import derived

# ---------------------------------------------------------------- which failures


@pytest.mark.parametrize(
    "cause",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited"),
        torch.distributed.DistNetworkError("The client socket has failed to connect to 10.0.0.1:29500"),
        torch.distributed.DistStoreError("wait timeout after 300000ms"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:9876"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        ConnectionResetError(104, "Connection reset by peer"),
        ObjectStoreFullError("the local object store is full"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_what_memory_connections_and_devices_meet_may_pass(cause: Exception):
    assert may_pass(cause)


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


def test_torch_says_itself_where_there_is_no_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**62, dtype=torch.uint8)
    assert may_pass(raised.value)


# ---------------------------------------------------------------- ranks


class Rank:
    """Counts what it is asked; each call meets what stands first in `meets`."""

    def __init__(self, *meets: Any) -> None:
        self.meets = list(meets)
        self.done: list[str] = []
        self.life = "one"
        self.gone = False
        self.writes: dict[Path, WrittenFile] = {}
        self.call, self.probe, self.written = (_Method(self, name) for name in ("call", "probe", "written"))
        self._kept = {name: KeptAnswer() for name in ("call", "written")}

    async def answer(self, name: str, *given: Any) -> Any:
        await asyncio.sleep(0)
        if self.gone:
            raise ActorDiedError()
        if name == "probe":
            return self
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
        if meets == "starts anew":
            self.life = "two"
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
    def __init__(self, rank: Rank, name: str) -> None:
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
    monkeypatch.setattr(gang.ray, "kill", handles.append)
    monkeypatch.setattr(gang, "DEATH_NOTICE_S", 0.2)
    monkeypatch.setattr("actors.learner.calls.BLIP_PATIENCE_S", 0.2)
    yield handles


async def learner_of(*ranks: Rank, folder: Path = Path("model")) -> Learner:
    learner = Learner(derived.learner(folder, step_deadline_s=5.0, world_size=len(ranks)))
    learner._ranks = [CalledRank(rank, f"learner/rank-{number}", "driver") for number, rank in enumerate(ranks)]
    await asyncio.gather(*(rank.meet() for rank in learner._ranks))
    return learner


@pytest.mark.parametrize("blip", ["unheard", "unsaid"])
async def test_a_rank_that_answers_again_is_asked_again_and_does_nothing_twice(blip: str, killed: list[Any]):
    ranks = Rank(blip, blip), Rank()
    learner = await learner_of(*ranks)
    await learner.set_policy(Path("p"))
    await learner.reset_optimizer()
    assert [rank.done for rank in ranks] == [["set_policy", "reset_optimizer"]] * 2
    assert killed == []


@pytest.mark.parametrize("end", ["dies", "starts anew"])
async def test_a_rank_that_does_not_or_as_another_is_lost_and_so_are_all(end: str, killed: list[Any]):
    learner = await learner_of(Rank(), Rank(end))
    with pytest.raises(RankLost, match="learner/rank-1 died during loading weights"):
        await learner.set_policy(Path("p"))
    assert len(killed) == 2
    with pytest.raises(RankLost, match="not running"):
        await learner.set_policy(Path("p"))


async def test_a_failure_is_given_once_more_too_and_is_not_tried_twice():
    kept, tried = KeptAnswer(), []

    def work() -> None:
        tried.append(1)
        raise LearnerError("rollout-0 has no tokens")

    for _ in range(2):
        with pytest.raises(LearnerError, match="rollout-0"):
            kept.of(7, work)
    assert len(tried) == 1 and kept.of(8, lambda: "next") == "next"


async def test_a_broken_connection_is_a_loss_though_nobody_died_and_a_fault_of_the_program_is_none(killed: list[Any]):
    broken = failed(RuntimeError("[gloo] Connection closed by peer"))
    with pytest.raises(RankLost, match=r"learner/rank-0 failed in loading weights: RuntimeError: \[gloo\] Conn"):
        await (await learner_of(Rank(broken), Rank(60))).set_policy(Path("p"))
    assert len(killed) == 2
    with pytest.raises(LearnerError, match="TypeError: no such argument") as ended:
        await (await learner_of(Rank(failed(TypeError("no such argument"))), Rank(60))).set_policy(Path("p"))
    assert not isinstance(ended.value, RankLost)


async def test_of_a_broken_connection_and_the_death_behind_it_the_death_is_told():
    broken = failed(RuntimeError("[gloo] Connection closed by peer"))
    learner = await learner_of(Rank(broken), Rank("dies"), Rank(60))
    with pytest.raises(RankLost, match="learner/rank-1 died"):
        await learner.set_policy(Path("p"))


# ---------------------------------------------------------------- what is on disk


def part(folder: Path, name: str, rank: int) -> dict[Path, WrittenFile]:
    (folder / name).write_text("weights")
    return {folder / name: WrittenFile(num_bytes=7, sha256="0", by=f"learner/rank-{rank}")}


async def test_what_ranks_wrote_that_are_gone_by_now_is_no_checkpoint(tmp_path: Path):
    learner = await learner_of(Rank(), Rank())
    await learner.save_checkpoint(tmp_path)
    learner._rank_died("learner/rank-1", ActorDiedError())
    with pytest.raises(RankLost, match="not running"):
        await learner.written()


async def test_a_checkpoint_is_not_written_while_a_ranks_part_is_missing(tmp_path: Path):
    ranks = Rank(), Rank()
    learner = await learner_of(*ranks)
    await learner.save_checkpoint(tmp_path / "step-1")
    (tmp_path / "step-1").mkdir()
    ranks[0].writes = part(tmp_path / "step-1", "state-0", 0)
    with pytest.raises(RankLost, match="learner/rank-1 has not written its part of step-1"):
        await learner.written()
    await learner.save_checkpoint(tmp_path / "step-1")
    ranks[1].writes = part(tmp_path / "step-1", "state-1", 1)
    assert len(await learner.written()) == 2


async def test_what_was_written_is_heard_once_more_where_the_answer_was_lost(tmp_path: Path):
    rank = Rank()
    learner = await learner_of(rank)
    await learner.save_checkpoint(tmp_path)
    rank.meets, rank.writes = ["unsaid"], part(tmp_path, "state-0", 0)
    assert list(await learner.written()) == [tmp_path / "state-0"]
    assert rank.done == ["save_checkpoint", "written"]


async def test_a_rank_that_cannot_write_is_no_loss_whatever_it_met(tmp_path: Path):
    learner = await learner_of(Rank(None, failed(RuntimeError("PytorchStreamWriter failed writing file"))))
    await learner.save_checkpoint(tmp_path)
    with pytest.raises(LearnerError, match="learner/rank-0 failed in writing a checkpoint") as full:
        await learner.written()
    assert not isinstance(full.value, RankLost)


# ---------------------------------------------------------------- a real line

BLIPS = """
import asyncio, ray
from types import SimpleNamespace
from actors.learner.calls import CalledRank, KeptAnswer

@ray.remote(concurrency_groups={"probe": 1})
class Counts:
    def __init__(self):
        self.kept, self.done = KeptAnswer(), 0

    @ray.method(concurrency_group="probe")
    def probe(self):
        return SimpleNamespace(life="one")

    def call(self, number, method, arguments):
        return self.kept.of(number, getattr(self, method))

    def work(self):
        self.done += 1
        return self.done

async def main():
    rank = CalledRank(Counts.remote(), "learner/rank-0", "driver")
    await rank.meet()
    print([await rank.call("work", seconds=60, reason="an update") for _ in range(20)])

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
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert str(list(range(1, 21))) in ended.stdout, ended.stderr
    assert "could not be reached and answers again" in ended.stderr
