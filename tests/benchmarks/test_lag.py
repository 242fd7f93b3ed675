"""The experiment of older weights: its arms, its lag and its table."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.generation.replicas import Replicas
from benchmarks import lag
from benchmarks.lag import LagConfig, experiment, lagging, main
from rstar_ray.config import RunConfig
from rstar_ray.run_dir.durable import write_json
from rstar_ray.run_dir.folder import RunDir
from tests.rstar_ray.fabricate import run_directory


@pytest.mark.parametrize(("steps", "served"), [(0, [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3]), (3, [0, 1])])
def test_replicas_serve_the_weights_of_so_many_publishes_before(
    steps: int, served: list[int], monkeypatch: pytest.MonkeyPatch
):
    seen: list[int] = []

    async def publish(_: Any, weights: int) -> None:
        seen.append(weights)

    monkeypatch.setattr(Replicas, "publish", publish)
    with lagging(steps):
        for version in range(5):
            asyncio.run(Replicas.publish(None, version))  # pyright: ignore[reportArgumentType]
    assert seen == served and Replicas.publish is publish


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The settings of every run asked for; each run is made up."""
    asked: list[RunConfig] = []

    def run(configs: list[RunConfig]) -> None:
        (config,) = configs
        asked.append(config)
        path, sft = Path(config.run_dir), config.stage == "sft"
        run_directory(path, seed=config.seed, stages={} if sft else {"stage1": config.steps})
        if sft:
            with RunDir(path).write_checkpoint("sft", 100) as folder:
                (folder / "model").mkdir()
                write_json(folder / "model" / "config.json", {})
            RunDir(path).finish_stage("sft", 100)

    monkeypatch.setattr(lag, "run", run)
    return asked


def test_every_correction_runs_at_every_lag_and_the_same_command_continues(ran: list[RunConfig], tmp_path: Path):
    config = LagConfig(
        seeds=1, lags=(0, 2), corrections=("none", "dppo"), rates=(3.0,), steps=20, run_dir=str(tmp_path / "lag")
    )
    report = experiment(config).read_text()
    arms = [one for one in ran if one.stage == "stage1"]
    assert [(one.correction, one.algorithm.loss, one.staleness) for one in arms] == [
        ("none", "clipped", 0), ("none", "clipped", 0), ("sampler", "dppo", 0)
    ]  # fmt: skip
    assert [one.optimizer.learning_rate for one in arms] == [pytest.approx(9e-4)] * 3
    lines = [[cell.strip() for cell in line.split("|")[1:4]] for line in report.splitlines() if line.startswith("|")]
    assert lines[2:] == [["3", "0", ""], ["3", "2", "none"], ["3", "2", "dppo"]]
    ran.clear()
    assert experiment(config).read_text() == report and ran == []


@pytest.mark.parametrize(("arguments", "named"), [(["--lags", "-1"], "--lags"), (["--rates", "0"], "--rates")])
def test_what_cannot_be_is_refused(
    arguments: list[str], named: str, ran: list[RunConfig], capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2 and ran == []
    assert capsys.readouterr().err.startswith(f"error: {named}")
