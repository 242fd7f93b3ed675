"""Recording trajectories with fakes in place of workers: a failure never ends a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from actors.generation.trajectory_recorder import record_trajectories
from actors.remote import Remote
from rstar_ray.rollouts import TrajectoryRef
from tests.logged import logged_lines

REFS = [TrajectoryRef("first batch", 0), TrajectoryRef("first batch", 3), TrajectoryRef("second batch", 1)]


class Worker:
    """Writes and tells; or does what `trouble` does instead."""

    def __init__(self, name: str = "generation/0", trouble: Exception | None = None) -> None:
        self.name = name
        self.trouble = trouble
        self.asked: list[tuple[Any, ...]] = []
        self.record = SimpleNamespace(remote=self._record)

    async def _record(self, *asked: Any) -> None:
        self.asked.append(asked)
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
