from pathlib import Path

import pytest

from recipes import roc_vs_grpo
from recipes.roc_vs_grpo import ARMS, ExperimentConfig, experiment, main
from rstar_ray.config import RunConfig, TinyConfig, differences
from rstar_ray.run_dir.durable import write_json
from rstar_ray.run_dir.folder import RunDir
from tests.rstar_ray.fabricate import run_directory


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The settings of every run asked for; each run is made up."""
    asked: list[RunConfig] = []

    def run(configs: list[RunConfig]) -> None:
        (config,) = configs
        asked.append(config)
        path, sft = Path(config.run_dir), config.stage == "sft"
        run_directory(
            path, seed=config.seed, resample=config.algorithm.resample, stages={} if sft else {"stage1": config.steps}
        )
        if sft:
            with RunDir(path).write_checkpoint("sft", 100) as folder:
                (folder / "model").mkdir()
                write_json(folder / "model" / "config.json", {})
            RunDir(path).finish_stage("sft", 100)

    monkeypatch.setattr(roc_vs_grpo, "run", run)
    return asked


@pytest.mark.long
def test_arms_differ_in_resampling_alone_and_start_from_their_seeds_policy(ran: list[RunConfig], tmp_path: Path):
    config = ExperimentConfig(seeds=2, first_seed=3, steps=20, run_dir=str(tmp_path / "e"), tiny=TinyConfig(slips=0.4))
    report = experiment(config)
    assert report == tmp_path / "e" / "experiment.md" and report.exists()
    assert [(one.stage, one.seed) for one in ran] == [
        (stage, seed) for seed in (3, 4) for stage in ("sft", *["stage1"] * len(ARMS))
    ]
    for sft, *arms in (ran[:5], ran[5:]):
        assert sft.tiny.slips == 0.4 and sft.run_dir.endswith(f"seed-{sft.seed}/sft")
        for arm, changes in zip(arms, ARMS.values(), strict=True):
            assert arm.model == str(Path(sft.run_dir) / "checkpoints" / "sft-step-000100" / "model")
            assert differences(arm, arms[0]) | {"run_dir": ""} == {
                "run_dir": "",
                **(changes if arm is not arms[0] else {}),
            }
            assert (arm.steps, arm.rollout.max_response_tokens, arm.evaluate.every_steps) == (20, 256, 10)
    drawn = [arm.algorithm.num_rollouts for arm in ran[1:5]]
    assert drawn == [4, 8, 8, 8] and {arm.algorithm.keep for arm in ran[1:5]} == {4}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--steps", "0"], "--steps"),
        (["--tiny.coupling", "2"], "--tiny.coupling"),
        (["--evaluate-every", "0"], "--evaluate-every"),
        (["--learning-rate", "-1"], "--learning-rate"),
        (["--max-response-tokens", "0"], "--max-response-tokens"),
        (["--max-response-tokens", "2048"], "--max-response-tokens"),
        (["--first-seed", str(2**32 - 2)], "--seeds"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments: list[str], named: str, ran: list[RunConfig], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(arguments))
    assert ended.value.code == 2 and ran == []
    assert capsys.readouterr().err.startswith(f"error: {named}")
