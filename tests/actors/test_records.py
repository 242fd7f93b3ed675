"""Recording and drawing with fakes in place of workers: neither ever ends a run; no Ray."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.generation import records
from actors.generation.records import draw_timelines, record_trajectories
from actors.remote import Remote
from rstar_ray.rollouts import TrajectoryRef
from scheduler.picture import Activity, KvSample, Span, Timeline

REFS = [TrajectoryRef("first batch", 0), TrajectoryRef("first batch", 3), TrajectoryRef("second batch", 1)]


class Method:
    """A method as an actor's handle has it."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.remote = function


class Worker:
    """Writes and tells; or does what `trouble` does instead."""

    def __init__(self, name: str = "generation/0", trouble: Exception | None = None) -> None:
        self.name = name
        self.trouble = trouble
        self.asked: list[tuple[Any, ...]] = []
        self.record = Method(self._record)
        self.timeline = Method(self._timeline)

    async def _record(self, *asked: Any) -> None:
        self.asked.append(asked)
        if self.trouble:
            raise self.trouble

    async def _timeline(self, rollouts: str) -> Timeline:
        if self.trouble:
            raise self.trouble
        spans = [Span(self.name, f"{rollouts}r", Activity.GENERATE, 100.0, 101.0)]
        return Timeline(spans, [KvSample(self.name, 100.5, 64)], 1_024)


def remotes(workers: dict[str, Worker]) -> dict[str, Any]:
    return {name: Remote(worker, name) for name, worker in workers.items()}


async def record(path: Path, **workers: Worker) -> list[str]:
    shown: list[str] = []
    seen = ["of rank 0", "of rank 1"]
    await record_trajectories(remotes(workers), REFS, path=path, seen=seen, stage="stage1", step=3, show=shown.append)
    return shown


async def draw(path: Path, **workers: Worker) -> list[str]:
    shown: list[str] = []
    await draw_timelines(remotes(workers), path, rollouts="stage1/3/", title="stage1, step 3", show=shown.append)
    return shown


async def test_one_worker_records_all(tmp_path: Path):
    first, second = Worker(), Worker()
    path = tmp_path / "step.jsonl"
    assert await record(path, a=first, b=second) == []
    lists = [["first batch"], ["first batch"], ["second batch"]]  # boxed, so that Ray hands on the refs themselves
    assert first.asked == [(lists, [0, 3, 1], path, "stage1", 3, [["of rank 0"], ["of rank 1"]])]
    assert second.asked == []


@pytest.mark.parametrize("gone", [RayActorError(), ActorUnavailableError("restarting", None)])
async def test_another_worker_records_where_the_first_is_gone(tmp_path: Path, gone: Exception):
    second = Worker()
    shown = await record(tmp_path / "step.jsonl", a=Worker(trouble=gone), b=second)
    assert len(second.asked) == 1
    assert len(shown) == 1 and "step.jsonl: a could not record it" in shown[0]


async def test_a_worker_that_does_not_answer_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "DEADLINE_S", 0.01)

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    wedged, second = Worker(), Worker()
    wedged.record = Method(never)
    shown = await record(tmp_path / "step.jsonl", a=wedged, b=second)
    assert len(second.asked) == 1 and "DeadlineExceeded" in shown[0]


async def test_without_any_worker_the_run_goes_on_with_a_shown_line(tmp_path: Path):
    shown = await record(tmp_path / "step.jsonl", a=Worker(trouble=RayActorError()))
    assert shown[-1] == "step.jsonl was not written: no worker is there"
    assert await record(tmp_path / "step.jsonl") == ["step.jsonl was not written: no worker is there"]


async def test_a_full_disk_is_a_shown_line_and_no_other_workers_matter(tmp_path: Path):
    second = Worker()
    shown = await record(tmp_path / "step.jsonl", a=Worker(trouble=OSError("no space left on device")), b=second)
    assert shown == ["step.jsonl was not written: OSError: no space left on device"]
    assert second.asked == []


async def test_the_picture_is_drawn_from_all_workers(tmp_path: Path):
    path = tmp_path / "plots" / "step.png"
    assert await draw(path, a=Worker("a"), b=Worker("b")) == []
    assert path.read_bytes().startswith(b"\x89PNG")


async def test_the_picture_lacks_a_worker_that_is_gone_and_says_so(tmp_path: Path):
    path = tmp_path / "step.png"
    shown = await draw(path, a=Worker("a", trouble=RayActorError()), b=Worker("b"))
    assert path.exists()
    assert len(shown) == 1 and shown[0].startswith("the picture lacks a: ")


async def test_without_a_timeline_nothing_is_drawn(tmp_path: Path):
    path = tmp_path / "step.png"
    assert len(await draw(path, a=Worker("a", trouble=RayActorError()))) == 1
    assert await draw(path) == []
    assert not path.exists()


async def test_a_picture_that_cannot_be_written_is_a_shown_line(tmp_path: Path):
    (tmp_path / "plots").write_text("a file where the folder should be")
    shown = await draw(tmp_path / "plots" / "step.png", a=Worker("a"))
    assert len(shown) == 1 and shown[0].startswith("step.png was not drawn: ")


async def test_a_cancelled_run_is_not_held_up_by_a_picture(tmp_path: Path):
    async def cancelled(_: str) -> Timeline:
        raise asyncio.CancelledError

    worker = Worker()
    worker.timeline = Method(cancelled)
    with pytest.raises(asyncio.CancelledError):
        await draw(tmp_path / "step.png", a=worker)
