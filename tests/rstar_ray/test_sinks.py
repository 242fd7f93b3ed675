"""W&B gets the same numbers as TensorBoard; its package is a fake at the seam, and is imported only where asked for."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rstar_ray.config import with_values
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir import sinks
from rstar_ray.run_dir.durable import read_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.metrics import MetricsLog, SftMetrics
from rstar_ray.run_dir.sinks import refuse_missing_sink, scalars
from rstar_ray.stages import run_rl
from tests.fakes import SkilledPolicy, adding_problems, fake_crew
from tests.rstar_ray.test_stages import stage

ROW = SftMetrics(step=1, loss=1.5, lr=1e-3, tokens_per_s=10, step_s=1)


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


def test_every_step_of_every_stage_goes_to_one_run(tmp_path: Path, wandb: FakeWandB):
    (tmp_path / "mine").mkdir()
    for name in ("sft", "stage1"):
        with MetricsLog(tmp_path / "mine", stage=name, after_step=0, num_steps=1, wandb="maths") as log:
            log.write(replace(ROW, stage=name))
    assert [run.logged for run in wandb.runs] == [
        [{f"{name}/loss": 1.5, f"{name}/lr": 1e-3, f"{name}/tokens_per_s": 10, f"{name}/step_s": 1, f"{name}/step": 1}]
        for name in ("sft", "stage1")
    ]
    assert wandb.runs[1].step_of == {"stage1/step": None, "stage1/*": "stage1/step"}
    assert all(run.finished for run in wandb.runs)
    first, second = wandb.given
    assert first["id"] == second["id"] == read_json(tmp_path / "mine/wandb.json")["id"]
    assert (first["project"], first["name"], first["resume"]) == ("maths", "mine", "allow")


def test_an_account_out_of_reach_is_one_line_and_the_rows_go_on(tmp_path: Path, wandb: FakeWandB):
    lines: list[str] = []
    with MetricsLog(tmp_path, stage="sft", after_step=0, num_steps=9, wandb="maths", show=lines.append) as log:
        for step in (1, 2, 3):
            log.write(replace(ROW, step=step))
    left_out = [line for line in lines if "left out" in line]
    assert left_out == ["Weights & Biases from step 2 on is left out: ConnectionError: no route to host"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


async def test_a_stage_hands_its_numbers_on_with_its_settings(tmp_path: Path, wandb: FakeWandB):
    config = with_values(stage("stage1", steps=2), {"telemetry.wandb": "maths"})
    with RunDir.open(tmp_path / "run", "stage1", asdict(config)) as run_dir:
        await run_rl(config, adding_problems(40), fake_crew(SkilledPolicy(), []), run_dir)
    (run,) = wandb.runs
    assert [row["stage1/step"] for row in run.logged] == [1, 2]
    assert "stage1/reward_mean" in run.logged[0] and "stage1/entropy" in run.logged[0]
    assert wandb.given[0]["config"]["stage1"]["telemetry"] == {"wandb": "maths", "traces": ""}


def test_without_the_option_the_package_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises
    refuse_missing_sink("")
    with MetricsLog(tmp_path, stage="sft", after_step=0, num_steps=1, show=lambda line: None) as log:
        log.write(ROW)


def test_a_missing_package_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--telemetry\.wandb: wandb is not installed; pip install wandb"):
        refuse_missing_sink("maths")


def test_a_rows_numbers_are_those_of_the_balancer_and_of_memory_too():
    row = {"stage": "a", "step": 3, "loss": None, "lr": 1.0, "balancer": {"rule": "x", "moves": 2}}
    assert scalars(row | {"memory_bytes": {"driver": 7}}) == {"lr": 1.0, "balancer/moves": 2, "memory_bytes/driver": 7}
