"""W&B gets the same numbers as TensorBoard; its package is a fake at the seam, and is imported only where asked for."""

import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rstar_ray.config import with_values
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.stages import run_rl
from tests.fakes import SkilledPolicy, adding_problems, fake_context
from tests.rstar_ray.test_stages import stage


class FakeRun:
    """What `wandb.init` returns: takes what the real one takes, and nothing after `finish`."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.step_of: dict[str, str | None] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.step_of[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        assert not self.finished
        if values.get("sft/step") == 2:
            raise ConnectionError("no route to host")
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


class FakeWandB(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.given: list[dict[str, Any]] = []

    def init(self, **given: Any) -> FakeRun:
        assert given.keys() <= {"project", "id", "name", "dir", "resume", "config"}
        self.given.append(given)
        self.runs.append(FakeRun())
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


async def test_a_stage_hands_its_numbers_on_with_its_settings(tmp_path: Path, wandb: FakeWandB):
    config = with_values(stage("stage1", steps=2), {"telemetry.wandb": "maths"})
    with RunDir.open(tmp_path / "run", "stage1", asdict(config)) as run_dir:
        await run_rl(config, adding_problems(40), fake_context(SkilledPolicy(), run_dir=run_dir))
    (run,) = wandb.runs
    assert [row["stage1/step"] for row in run.logged] == [1, 2]
    assert "stage1/reward_mean" in run.logged[0] and "stage1/entropy" in run.logged[0]
    assert wandb.given[0]["config"]["stage1"]["telemetry"] == {"wandb": "maths", "traces": ""}
