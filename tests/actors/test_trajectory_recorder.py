"""Recording trajectories with fakes in place of workers: a failure never ends a run."""

# pyright: reportPrivateUsage=false

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.generation import trajectory_recorder
from actors.generation.generation_actor import GenerationActor
from actors.generation.trajectory_recorder import record_trajectories
from actors.remote import Remote
from rstar_ray.rollouts import TrajectoryRef
from rstar_ray.run_dir.durable import read_rows
from tests.fakes import adding_problems
from tests.logged import logged_lines
from tests.rstar_ray import fabricate

REFS = [TrajectoryRef("first batch", 0), TrajectoryRef("first batch", 3), TrajectoryRef("second batch", 1)]


class Worker:
    """Writes and tells; or does what `trouble` does instead."""

    def __init__(self, name: str = "generation/0", trouble: Exception | None = None, writes_s: float = 0.0) -> None:
        self.name = name
        self.trouble = trouble
        self.writes_s = writes_s
        self.asked: list[tuple[Any, ...]] = []
        self.record = SimpleNamespace(remote=self._record)

    async def _record(self, *asked: Any) -> None:
        self.asked.append(asked)
        await asyncio.sleep(self.writes_s)
        if self.trouble:
            raise self.trouble


def remotes(workers: dict[str, Worker]) -> dict[str, Any]:
    return {name: Remote(worker, name) for name, worker in workers.items()}


async def record(path: Path, **workers: Worker) -> list[str]:
    seen = ["of rank 0", "of rank 1"]
    with logged_lines() as lines:
        await record_trajectories(remotes(workers), REFS, path=path, seen=seen, stage="stage1", step=3)
    return lines


@pytest.mark.parametrize("gone", [RayActorError(), ActorUnavailableError("restarting", None)])
async def test_another_worker_records_where_the_first_is_gone(tmp_path: Path, gone: Exception):
    second = Worker()
    shown = await record(tmp_path / "step.jsonl", a=Worker(trouble=gone), b=second)
    assert len(second.asked) == 1
    assert len(shown) == 1 and "step.jsonl: a could not record it" in shown[0]


async def test_without_any_worker_the_run_continues_with_a_shown_line(tmp_path: Path):
    shown = await record(tmp_path / "step.jsonl", a=Worker(trouble=RayActorError()))
    assert shown[-1] == "step.jsonl was not written: no worker is available"
    assert await record(tmp_path / "step.jsonl") == ["step.jsonl was not written: no worker is available"]


async def test_a_full_disk_is_a_shown_line_and_no_other_workers_matter(tmp_path: Path):
    second = Worker()
    shown = await record(tmp_path / "step.jsonl", a=Worker(trouble=OSError("no space left on device")), b=second)
    assert shown == ["step.jsonl was not written: OSError: no space left on device"]
    assert second.asked == []


async def test_a_worker_that_is_late_may_still_be_writing_so_no_other_one_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trajectory_recorder, "DEADLINE_S", 0.01)
    monkeypatch.setattr(trajectory_recorder, "DEADLINE_PER_TRAJECTORY_S", 0.01)
    second = Worker()
    shown = await record(tmp_path / "step.jsonl", a=Worker(writes_s=60), b=second)
    assert len(shown) == 1 and "step.jsonl was not written in time" in shown[0]
    assert second.asked == []


async def test_more_trajectories_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trajectory_recorder, "DEADLINE_S", 0.01)
    monkeypatch.setattr(trajectory_recorder, "DEADLINE_PER_TRAJECTORY_S", 20.0)
    assert await record(tmp_path / "step.jsonl", a=Worker(writes_s=0.1)) == []


async def test_a_worker_answers_others_while_it_decodes(tmp_path: Path):
    loop, probed, answered = asyncio.get_running_loop(), threading.Event(), list[bool]()

    def decode(token_ids: Sequence[int]) -> str:
        loop.call_soon_threadsafe(probed.set)
        answered.append(probed.wait(10))
        return fabricate.decode(token_ids)

    worker = object.__new__(GenerationActor)  # without an engine
    worker._name, worker._chat = "generation/0", SimpleNamespace(decode=decode)  # pyright: ignore
    batch = loop.create_future()
    batch.set_result([fabricate.trajectory(adding_problems(1)[0], [("It is 1.", "", None)], reward=1.0)])
    path = tmp_path / "step.jsonl"
    await worker.record([[batch]], [0], path, "stage1", 3)
    assert answered and all(answered)
    assert read_rows(path)[0]["turns"][0]["completion"] == "It is 1."
