"""Checkpoints beside the steps: what waits, what does not, and what is left when one cannot be written."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray import checkpointing
from rstar_ray.checkpointing import Saving, saving
from rstar_ray.errors import ConfigError, LearnerError, Stopped
from rstar_ray.run_dir.durable import append_row, read_json, write_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.manifest import MANIFEST, WrittenFile, checksum
from rstar_ray.stage_progress import DataPosition, StageProgress
from tests.fakes import CharChat, SkilledPolicy, SkillLearner, fake_context, in_run
from tests.rstar_ray.test_stages import stage, train

pytestmark = pytest.mark.usefixtures("without_fsync")
CONFIG = stage("stage1", steps=6, checkpoint__every_steps=2, checkpoint__keep=3)


class SlowLearner(SkillLearner):
    """Takes its copy at once, and has written it when it is let."""

    def __init__(self, policy: SkilledPolicy) -> None:
        super().__init__(policy)
        self.may_write = asyncio.Event()
        self.failure: Exception | None = None
        self.writes = 0

    async def written(self) -> dict[Path, WrittenFile]:
        self.writes += 1
        await self.may_write.wait()
        if self.failure is not None:
            raise self.failure
        return await super().written()


def progress(step: int) -> StageProgress:
    return StageProgress(step=step, policy_version=step, position=DataPosition())


@asynccontextmanager
async def slow(path: Path, **parts: Any) -> AsyncIterator[tuple[Saving, SlowLearner, RunDir]]:
    learner = SlowLearner(SkilledPolicy())
    context = replace(fake_context(learner.policy, learner=learner), **parts)
    with RunDir.open(path, "stage1", asdict(CONFIG)) as run_dir:
        async with saving(CONFIG, in_run(context, run_dir)) as saves:
            yield saves, learner, run_dir


def steps(run_dir: RunDir) -> list[int]:
    return [checkpoint.step for checkpoint in run_dir.checkpoints("stage1")]


async def test_a_step_begins_once_the_copy_is_taken_and_the_checkpoint_is_whole_later(tmp_path: Path):
    async with slow(tmp_path) as (saves, learner, run_dir):
        learner.steps = 7
        await saves.take(progress(1))
        learner.steps = 8  # the next step
        saves.refuse_failed()
        assert (steps(run_dir), learner.writes) == ([], 1)
        learner.may_write.set()
        await saves.settled()
        assert steps(run_dir) == [1]
        assert read_json(run_dir.checkpoints("stage1")[0].path / "skill.json")[2] == 7


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_by_name_and_the_one_before_stays(tmp_path: Path):
    with pytest.raises(LearnerError, match="rank-1 failed in writing a checkpoint: OSError: no space left"):
        async with slow(tmp_path) as (saves, learner, _):
            learner.may_write.set()
            await saves.take(progress(1))
            await saves.settled()
            learner.failure = LearnerError("learner/rank-1 failed in writing a checkpoint: OSError: no space left")
            await saves.take(progress(2))
            await asyncio.sleep(0.01)
            saves.refuse_failed()
    assert steps(RunDir(tmp_path)) == [1] and not list((tmp_path / "checkpoints").glob(".*"))


async def test_a_stage_that_is_cancelled_leaves_the_checkpoint_before_and_one_that_fails_brings_its_newest_to_an_end(
    tmp_path: Path,
):
    with pytest.raises(asyncio.CancelledError):
        async with slow(tmp_path) as (saves, learner, _):
            await saves.take(progress(1))
            raise asyncio.CancelledError
    assert steps(RunDir(tmp_path)) == [] and not list((tmp_path / "checkpoints").glob(".*"))
    with pytest.raises(RuntimeError, match="the step failed"):
        async with slow(tmp_path) as (saves, learner, _):
            await saves.take(progress(1))
            asyncio.get_running_loop().call_later(0.02, learner.may_write.set)
            raise RuntimeError("the step failed")
    assert steps(RunDir(tmp_path)) == [1]


async def test_a_run_that_is_asked_to_stop_ends_with_its_checkpoint_whole(tmp_path: Path):
    learner = SlowLearner(SkilledPolicy())
    asyncio.get_running_loop().call_later(0.3, learner.may_write.set)
    with pytest.raises(Stopped, match="after step 1"):
        await train(CONFIG, tmp_path, fake_context(learner.policy, learner=learner), stops_after=0)
    assert steps(RunDir(tmp_path)) == [1]


async def test_the_manifest_has_every_file_of_every_writer_as_it_was_said_and_what_was_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with slow(tmp_path, chat=CharChat()) as (saves, learner, run_dir):

        def said(name: str, text: str, by: str) -> tuple[Path, WrittenFile]:
            (folder,) = run_dir.checkpoints_path.glob(".tmp-stage1-step-000001-*")
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return path, WrittenFile(num_bytes=path.stat().st_size, sha256=checksum(path), by=by)

        async def written() -> dict[Path, WrittenFile]:
            parts = [("a", "0", "learner/rank-0"), ("b", "1", "learner/rank-1"), ("model/c", "0", "learner/rank-0")]
            return await SkillLearner.written(learner) | dict(said(*part) for part in parts)

        def exported(model: Path, chat: object) -> list[Path]:
            write_json(model / "c", "changed since")
            return [model / "c"]

        learner.written = written
        monkeypatch.setattr(checkpointing, "write_chat_files", exported)
        await saves.take(progress(1), finishes=True)
        (checkpoint,) = run_dir.checkpoints("stage1")
        files = read_json(checkpoint.path / MANIFEST)["files"]
        assert {name: file["by"] for name, file in files.items()} == {
            "a": "learner/rank-0",
            "b": "learner/rank-1",
            "model/c": "driver",
            "model/config.json": "driver",
            "progress.json": "driver",
            "skill.json": "driver",
        }
        (checkpoint.path / "b").write_text("2")
        with pytest.raises(ConfigError, match="b of learner/rank-1 is damaged: its checksum differs"):
            await run_dir.newest_undamaged_checkpoint("stage1", 10)


async def test_the_checkpoint_with_the_best_heldout_score_is_kept_and_the_run_resumes_from_the_newest(tmp_path: Path):
    async with slow(tmp_path) as (saves, learner, run_dir):
        learner.may_write.set()
        for step, score in enumerate((0.2, 0.6, 0.5, 0.6, 0.1, 0.3, 0.4, 0.2), start=1):
            await saves.take(progress(step))
            row = {"stage": "stage1", "step": step, "set": "held-out", "avg_at_k": score}
            append_row(run_dir.evaluations_path, row)
            append_row(run_dir.evaluations_path, {**row, "set": "aime", "avg_at_k": 1 - score})
            await saves.settled()
        assert steps(run_dir) == [4, 6, 7, 8]
        newest = await run_dir.newest_undamaged_checkpoint("stage1", 10)
        assert newest is not None and newest.step == 8
