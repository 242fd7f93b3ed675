"""A stage that was begun by mistake is thrown away, and nothing else is."""

import fcntl
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rstar_ray.config import with_values
from rstar_ray.evaluation.evaluator import HELD_OUT, run_evaluation
from rstar_ray.run_dir.__main__ import main
from rstar_ray.run_dir.durable import read_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.verify_run import faults
from tests.fakes import SkilledPolicy, adding_problems, fake_context, in_run
from tests.rstar_ray.test_stages import stage, train

pytestmark = pytest.mark.usefixtures("without_fsync")
SMALL = stage(
    "stage1", steps=2, prompts_per_step=2, algorithm__rollouts_per_prompt=4, algorithm__keep=2,
    algorithm__least_failures=1, evaluate__samples=2, checkpoint__every_steps=1,
)  # fmt: skip
HELDOUT = adding_problems(2, seed=1)


async def trained(path: Path, name: str, **values: object) -> None:
    config = with_values(SMALL, {"stage": name, **values})
    context = fake_context(SkilledPolicy())
    end = await train(config, path, context, adding_problems(6), heldout=HELDOUT)
    await run_evaluation(config, {HELD_OUT: HELDOUT}, in_run(context, path), step=end.step)


def files(path: Path) -> dict[str, bytes]:
    """All that lies there, but for the lock."""
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()} | {".lock": b""}


def forget(path: Path, stage: str, *more: str) -> int:
    return main(["forget", str(path), "--stage", stage, *more])


async def two_stages(path: Path) -> dict[str, bytes]:
    """What there was before the second."""
    await trained(path, "stage1")
    before = files(path)
    await trained(path, "stage2", drop_solved=True)
    checkpoints = ("damaged-stage2-step-000001", ".tmp-stage2-step-000002-1f", ".tmp-removed-stage2-step-000001")
    left = (*(f"checkpoints/{name}/a" for name in checkpoints), "journal/stage2-step-000003/a", "plots/step-stage2.png")
    left += ("export/stage2-step-000001/a",)
    for name in left:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    return before


async def test_all_that_a_stage_left_goes_and_it_may_be_begun_in_another_way(tmp_path: Path):
    before = await two_stages(tmp_path)
    assert any("filter" in name for name in files(tmp_path))
    assert forget(tmp_path, "stage2", "--yes") == 0
    assert files(tmp_path) == before and faults(tmp_path) == []
    await trained(tmp_path, "stage2", **{"rollout.max_turns": 3})
    assert read_json(tmp_path / "config.json")["stage2"]["rollout"]["max_turns"] == 3


async def test_without_yes_it_is_only_said_what_would_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    await two_stages(tmp_path)
    whole = files(tmp_path)
    assert forget(tmp_path, "stage2") == 2 and files(tmp_path) == whole
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "nothing was removed. Hint: add --yes to remove it"
    assert {"would remove finished/stage2.json", "would remove 2 rows of ledger.jsonl"} < {*said}
    assert "would remove stage2 from config.json" in said and not any("stage1" in line for line in said)
    assert forget(tmp_path, "stage2", "--yes") == 0
    assert [line.replace("removed ", "would remove ") for line in capsys.readouterr().out.splitlines()] == said[:-1]


async def test_a_stage_that_another_began_from_is_kept_until_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    await two_stages(tmp_path)
    whole = files(tmp_path)
    assert forget(tmp_path, "stage1", "--yes") == 2 and files(tmp_path) == whole
    assert capsys.readouterr().err == (
        f"error: --stage: stage2 of {tmp_path} started from the checkpoint of stage1. Hint: forget stage2 first, or "
        "name a new directory for stage1\n"
    )
    with RunDir.open(tmp_path, "stage3", asdict(replace(SMALL, stage="stage3"))):
        pass  # a command of several stages claims it for all of them
    assert [forget(tmp_path, stage, "--yes") for stage in ("stage2", "stage1", "stage3")] == [0, 0, 0]
    assert set(files(tmp_path)) - {".lock"} == {"config.json", "evaluations.jsonl", "ledger.jsonl", "metrics.jsonl"}


async def test_what_is_in_use_or_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    await trained(tmp_path, "stage1")
    for none in ("stage2", "*"):
        assert forget(tmp_path, none, "--yes") == 2
        assert capsys.readouterr().err == f"error: --stage: {tmp_path} has no {none}. Hint: give one of stage1\n"
    with (tmp_path / ".lock").open("a+") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert forget(tmp_path, "stage1", "--yes") == 2
    assert "is in use by" in capsys.readouterr().err
    assert main(["forget", str(tmp_path), "stage1"]) == 2 and "--stage: is required" in capsys.readouterr().err
    assert faults(tmp_path) == []


async def test_what_a_crash_leaves_is_removed_by_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = await two_stages(tmp_path)
    removed: list[Path] = []

    class Crash(Exception): ...

    rmtree = shutil.rmtree

    def some(path: Path, **more: bool) -> None:
        if len(removed) == 5:
            raise Crash
        removed.append(path)
        rmtree(path, **more)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(shutil, "rmtree", some)
        forget(tmp_path, "stage2", "--yes")
    assert files(tmp_path) != before
    assert forget(tmp_path, "stage2", "--yes") == 0 and files(tmp_path) == before
