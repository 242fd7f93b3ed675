"""The experiment of older weights: its arms, its lag and its table."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from actors.generation.replicas import Replicas
from benchmarks import lag
from benchmarks.lag import LagConfig, experiment, lagging, main
from rstar_ray.config import RunConfig
from rstar_ray.errors import ConfigError, DeadlineExceeded, NothingLearned, RankLost, RStarError, Stopped
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
        write_json(path / "config.json", {config.stage: asdict(config)})
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


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Arms end with this error from now on."""
    made_up = lag.run

    def run(configs: list[RunConfig]) -> None:
        made_up(configs)
        if configs[0].stage == "stage1":
            raise error

    monkeypatch.setattr(lag, "run", run)


ONE_ARM = LagConfig(seeds=1, lags=(0,), steps=10)


@pytest.mark.parametrize(
    "error",
    [
        Stopped("stopped after step 4"),
        DeadlineExceeded("driver", "rollouts", "the next rollout", 180.0),
        RankLost("rank 1 died"),
        RStarError("200 of 256 rollouts were dropped"),
    ],
)
def test_an_arm_that_its_training_did_not_end_is_not_done_and_starts_again(
    error: Exception, ran: list[RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    config = replace(ONE_ARM, run_dir=str(tmp_path / "lag"))
    with monkeypatch.context() as patched:
        failing(patched, error)
        with pytest.raises(type(error)):
            experiment(config)
    path = Path(ran[-1].run_dir)
    assert not (path / "done").exists()
    (path / "of-the-first-start").touch()
    experiment(config)
    assert (path / "done").exists() and not (path / "of-the-first-start").exists()


def test_an_arm_whose_training_diverged_is_done(ran: list[RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    failing(monkeypatch, NothingLearned("the updates were not finite"))
    config = replace(ONE_ARM, lags=(0, 1), corrections=("none",), run_dir=str(tmp_path / "lag"))
    assert "step 10" in experiment(config).read_text()
    assert [(Path(one.run_dir) / "done").exists() for one in ran if one.stage == "stage1"] == [True, True]


@pytest.mark.parametrize(("option", "other"), [("--steps", {"steps": 20}), ("--evaluate-every", {"evaluate_every": 5})])
def test_arms_of_other_settings_are_refused_before_any_arm_runs(
    option: str, other: dict[str, int], ran: list[RunConfig], tmp_path: Path
):
    config = replace(ONE_ARM, run_dir=str(tmp_path / "lag"))
    experiment(config)
    ran.clear()
    with pytest.raises(ConfigError, match=rf"{option}: .*rate-1-lag-0-none .*another --run-dir"):
        experiment(replace(config, lags=(1, 0), **other))
    assert ran == []


@pytest.mark.parametrize(("arguments", "named"), [(["--lags", "-1"], "--lags"), (["--rates", "0"], "--rates")])
def test_what_cannot_be_is_refused(
    arguments: list[str], named: str, ran: list[RunConfig], capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2 and ran == []
    assert capsys.readouterr().err.startswith(f"error: {named}")
