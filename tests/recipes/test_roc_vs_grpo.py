from pathlib import Path

import pytest

from recipes import roc_vs_grpo
from recipes.roc_vs_grpo import ARMS, ExperimentConfig, comparison, experiment, main
from rstar_ray.config import RunConfig, TinyConfig, differences
from rstar_ray.report.run_record import RunRecord
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


def record(errors: list[tuple[float | None, int]], score: float) -> RunRecord:
    """One stage: (rate of failed calls, calls) in the correct rollouts of each step, and the last held-out score."""
    steps = [
        {"tool_error_rate_correct": rate, "calls_in_correct": calls, "response_tokens_mean": 50.0}
        for rate, calls in errors
    ]
    evaluations = [{"stage": "stage1", "set": "held-out", "rl_step": len(steps), "avg_at_k": score}]
    return RunRecord(Path("run"), {}, [], steps, (), evaluations, [], [])


def test_arms_are_compared_by_pooled_tool_errors_and_paired_scores():
    plain = [record([(0.8, 10), (0.4, 30)] * 8, 0.5), record([(0.5, 40)] * 15, 0.7)]
    roc = [record([(0.1, 10)] * 15, 0.6), record([(0.2, 10)] * 15, 0.9)]
    rows = [
        [cell.strip() for cell in line.split("|")] for line in comparison({"plain": plain, "RoC": roc}).splitlines()
    ]
    assert [row[2:] for row in rows if row[1:2] == ["plain"]] == [
        ["50.0 % ± 0.0 %", "1.00 ± 0.00", "60.0 % ± 127.1 %", "+0.0 ± 0.0", "50 ± 0", ""]
    ]
    assert [row[2:] for row in rows if row[1:2] == ["RoC"]] == [
        ["15.0 % ± 63.5 %", "0.30 ± 1.27", "75.0 % ± 190.6 %", "+15.0 ± 63.5", "50 ± 0", ""]
    ]


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
