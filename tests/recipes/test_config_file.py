"""`--config FILE`: options from TOML, over which the command line wins; a run writes its own so that it can be read."""

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from actors.launch.command_line import config_in, parse
from actors.launch.run import run
from actors.preflight.__main__ import settings_findings
from actors.preflight.facts import Verdict
from recipes import plan
from recipes.evaluate import EVALUATE
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from recipes.stage3 import STAGE_3
from rstar_ray.config import RunConfig, idle, leaves
from rstar_ray.config.options import as_toml, with_config_file
from rstar_ray.config.recipe import Recipe
from rstar_ray.errors import ConfigError
from tests.fakes import Enough, enough


def written(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    return str(path)


def saved(path: Path, config: RunConfig) -> str:
    """A file with these settings, as a run writes it."""
    unused = idle(config)
    return written(path, as_toml({name: value for name, value in leaves(config).items() if name not in unused}))


def test_the_command_line_wins_over_the_file_and_the_file_over_the_scale(tmp_path: Path):
    text = 'scale = "tiny"\nsteps = 7\n\n[algorithm]\nkeep = 3\nleast_failures = 1\n\n[tools]\nuse = ["python"]\n'
    file = written(tmp_path / "run.toml", text)
    (config,) = parse([STAGE_1], ["--config", file, "--steps", "9", "--run-dir", str(tmp_path)])
    assert (config.scale, config.steps, config.algorithm.keep, config.tools.use) == ("tiny", 9, 3, ("python",))
    assert parse([STAGE_1], [f"--config={file}", "--run-dir", str(tmp_path)])[0].steps == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepz = 3", "--stepz: no such option. Hint: perhaps --steps"),
        ('steps = "many"', "--steps: "),
        ("steps = ", "--config: "),
        ('[data]\nmix = ["a=1", "--b=2"]', "--config, data.mix: '--b=2' would be read as an option"),
        ("[algorithm]\ncorrection_cap = 3.0\ncorrection = 'icepop'", "--algorithm.correction-cap: has no effect"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_as_on_the_command_line(text: str, said: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        parse([STAGE_1], ["--scale", "tiny", "--config", written(tmp_path / "run.toml", text)])
    assert str(refused.value).startswith(said)
    with pytest.raises(ConfigError, match=r"^--config: 'gone\.toml' cannot be read"):
        parse([STAGE_1], ["--config", "gone.toml"])


def test_a_protocol_on_the_command_line_wins_over_the_file_and_one_in_the_file_does_not(tmp_path: Path):
    engine = "scale = 'tiny'\n[engine]\nmax_context_tokens = 40_960\n[evaluate]\n"
    file = written(tmp_path / "run.toml", f"{engine}samples = 3\n")
    (config,) = parse([EVALUATE], ["--config", file, "--evaluate.protocol", "paper"])
    assert (config.evaluate.protocol, config.evaluate.samples) == ("paper", 16)
    file = written(tmp_path / "both.toml", f"{engine}protocol = 'paper'\nsamples = 3\n")
    assert parse([EVALUATE], ["--config", file])[0].evaluate.samples == 3


def test_another_scale_than_the_files_and_a_second_file_are_refused(tmp_path: Path):
    file = written(tmp_path / "run.toml", "scale = 'tiny'\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"^--scale: differs from the scale in the file"):
        parse([STAGE_1], ["--config", file, "--scale", "gpu"])
    with pytest.raises(ConfigError, match=r"^--config: given 2 times"):
        parse([STAGE_1], ["--config", file, f"--config={file}"])


def test_a_list_at_the_files_end_takes_no_positional_and_a_dash_is_not_an_option(tmp_path: Path):
    file = written(tmp_path / "run.toml", "steps = -1\n[tools]\nuse = ['python']\n")
    assert with_config_file(["RUN", "--config", file]) == ["RUN", "--steps=-1", "--tools.use", "python"]


@pytest.mark.parametrize("recipe", [SFT, STAGE_1, STAGE_3], ids=lambda recipe: recipe.stage)
@pytest.mark.parametrize("scale", ["tiny", "gpu-8"])
def test_resolved_settings_are_the_same_when_they_are_read_again(recipe: Recipe, scale: str, tmp_path: Path):
    odd = ["--chat.before", 'a "quote"\nand ünïcode 😀', "--run-dir", str(tmp_path / "run")]
    (config,) = parse([recipe], ["--scale", scale, *odd])
    file = saved(tmp_path / "run.toml", config)
    assert tomllib.loads(Path(file).read_text("utf-8"))["stage"] == recipe.stage
    assert parse([recipe], ["--config", file]) == [config]


def test_an_evaluation_takes_the_settings_of_a_stage_but_not_the_model_it_started_from(tmp_path: Path):
    mine = ["--scale", "tiny", "--run-dir", str(tmp_path), "--model", str(tmp_path), "--telemetry.wandb", "mine"]
    (trained,) = parse([STAGE_1], [*mine, "--evaluate.samples", "3", "--chat.system", "Be brief."])
    file = saved(tmp_path / "stage1.toml", trained)
    (config,) = parse([EVALUATE], ["--config", file, "--evaluate.max-turns", "4"])
    assert (config.stage, config.model, config.telemetry.wandb) == ("evaluate", "", "")
    assert (config.run_dir, config.evaluate.samples, config.evaluate.max_turns) == (str(tmp_path), 3, 4)
    assert config.chat == trained.chat
    with pytest.raises(ConfigError, match=r"^--rollout\.max-turns: .*--evaluate\.max-turns"):
        parse([EVALUATE], ["--config", file, "--rollout.max-turns", "4"])
    with pytest.raises(ConfigError, match=r"^--stage"):
        parse([STAGE_3], ["--config", file])


def test_a_run_writes_its_settings_beside_config_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("actors.launch.run.connect", enough)
    options = ["--scale", "tiny", "--run-dir", str(tmp_path / "run"), "--sft.steps", "12"]
    configs = parse([SFT], options)
    with pytest.raises(Enough):
        run(configs)
    (again,) = parse([SFT], ["--config", str(tmp_path / "run" / "sft.toml")])
    same: Any = asdict(again)
    assert same == asdict(configs[0])


def test_the_whole_recipe_takes_the_file_of_one_stage(tmp_path: Path):
    """It holds for its stage; what was changed there (not its own budgets) holds for the others."""
    mine = ["--scale", "tiny", "--run-dir", str(tmp_path), "--seed", "5", "--sandbox.slots", "3", "--steps", "7"]
    (trained,) = parse([STAGE_1], [*mine, "--evaluate.samples", "3"])
    file = saved(tmp_path / "stage1.toml", trained)
    sft, first, third = parse([SFT, STAGE_1, STAGE_3], ["--config", file, "--evaluate.samples", "2"])
    assert (first.steps, third.steps, sft.sft.steps) == (7, 7, parse([SFT], ["--scale", "tiny"])[0].sft.steps)
    assert {(one.scale, one.seed, one.sandbox.slots, one.evaluate.samples) for one in (sft, first, third)} == {
        ("tiny", 5, 3, 2)
    }
    assert first.rollout.max_response_tokens == trained.rollout.max_response_tokens
    (default,) = parse([STAGE_3], ["--scale", "tiny"])
    assert third.rollout == default.rollout != first.rollout
    with pytest.raises(ConfigError, match=r"^--config: .*got stage1"):
        parse([SFT, STAGE_3], ["--config", file])


def no_checks(run: RunConfig) -> tuple[()]:
    return ()


def test_a_plan_takes_the_settings_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "check_files", no_checks)  # the run lacks problems and a model
    file = written(tmp_path / "run.toml", 'scale = "gpu-8"\n[learner]\nlora_rank = 8\n')
    assert (planned := plan.parsed(["--run-config", file, "--gpus", "16"])).lora_rank == 8
    assert (planned.gpus, planned.gpu_memory_share) == (16, plan.of_scale("gpu-8").gpu_memory_share)


def test_what_the_start_of_a_run_refuses_plan_and_preflight_refuse(tmp_path: Path):
    text = 'scale = "tiny"\n[data]\ntrain = "/nowhere.jsonl"\n'
    file = written(tmp_path / "run.toml", text)
    with pytest.raises(ConfigError, match=r"--data\.train: /nowhere\.jsonl does not exist"):
        plan.parsed(["--run-config", file])
    found = settings_findings(config_in(file), "here")
    assert [finding.verdict for finding in found] == [Verdict.WRONG]
    assert found[0].message == "--data.train: /nowhere.jsonl does not exist"
    good = settings_findings(config_in(written(tmp_path / "good.toml", 'scale = "tiny"\nstage = "sft"\n')), "here")
    assert {finding.verdict for finding in good} == {Verdict.OK} and len(good) > 5
