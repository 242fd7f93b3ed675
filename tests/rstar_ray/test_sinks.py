"""External sinks receive the same metrics as TensorBoard; a package that is not installed is a fake here."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rstar_ray.config import with_values
from rstar_ray.config.telemetry import TelemetryConfig
from rstar_ray.errors import ConfigError, Stopped
from rstar_ray.run_dir.sinks import refuse_missing_sink
from tests.rstar_ray.test_stages import stage, train


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
    await train(config, tmp_path / "run")
    (run,) = wandb.runs
    assert [row["stage1/step"] for row in run.logged] == [1, 2]
    assert "stage1/reward_mean" in run.logged[0] and "stage1/entropy" in run.logged[0]
    assert wandb.given[0]["config"]["stage1"]["telemetry"] == {
        "wandb": "maths",
        "trackio": "",
        "mlflow": "",
        "traces": "",
    }


class FakeTrackio(ModuleType):
    def __init__(self) -> None:
        super().__init__("trackio")
        self.given: list[dict[str, Any]] = []
        self.steps: list[tuple[str, int]] = []
        self.finished: list[str] = []

    def init(self, *, project: str, name: str, group: str, resume: str, config: dict[str, Any], embed: bool) -> Any:
        self.given.append({"project": project, "name": name, "group": group, "resume": resume, "config": config})

        def log(values: dict[str, float], step: int) -> None:
            assert "reward_mean" in values
            self.steps.append((name, step))

        return SimpleNamespace(log=log, finish=lambda: self.finished.append(name))


class FakeMLflow(ModuleType):
    """As the fluent interface of MLflow 3: one active run, steps of any order."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: list[str] = []
        self.steps: list[tuple[str, int]] = []
        self.active = ""

    def set_experiment(self, name: str) -> None:
        assert name == "maths"

    def start_run(self, *, run_id: str | None, run_name: str) -> Any:
        assert not self.active
        self.active = run_id or f"{run_name}-{len(self.runs)}"
        self.runs.append(self.active)
        return SimpleNamespace(info=SimpleNamespace(run_id=self.active))

    def log_dict(self, values: dict[str, Any], name: str) -> None:
        assert values["stage1"]["steps"] == 2 and name == "config.json"

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        assert "stage1/reward_mean" in values
        self.steps.append((self.active, step))

    def end_run(self) -> None:
        self.active = ""


async def test_trackio_and_mlflow_get_each_step_and_a_resumed_run_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trackio, mlflow = FakeTrackio(), FakeMLflow()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = with_values(stage("stage1", steps=2), {"telemetry.trackio": "maths", "telemetry.mlflow": "maths"})
    with pytest.raises(Stopped):
        await train(config, tmp_path / "run", stops_after=0)
    await train(config, tmp_path / "run")
    assert trackio.steps == [("run-stage1", 1), ("run-stage1", 2)] and len(trackio.finished) == 2
    assert trackio.given[1]["resume"] == "allow" and trackio.given[1]["config"]["steps"] == 2
    assert mlflow.runs == ["run-0", "run-0"] and mlflow.steps == [("run-0", 1), ("run-0", 2)]


def test_a_sink_whose_package_is_missing_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch):
    for option in ("wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, option, None)
        asked = with_values(TelemetryConfig(), {option: "maths"})
        with pytest.raises(ConfigError, match=rf"^--telemetry\.{option}: .*pip install {option}"):
            refuse_missing_sink(asked)
    refuse_missing_sink(TelemetryConfig())
