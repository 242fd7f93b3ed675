"""What differs between the stage that made a policy and who asks it now is told, with the option that asks as then."""

import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from recipes import session
from recipes.as_before import asked_otherwise, stage_of
from recipes.command_line import parse
from recipes.evaluate import EVALUATE
from recipes.session import launch_evaluation, run
from recipes.stage1 import STAGE_1
from recipes.stage2 import STAGE_2
from recipes.talker import TalkConfig, own_talker
from rstar_ray.config import ChatConfig, RunConfig, ToolsConfig, leaves, with_values
from rstar_ray.config.options import spelled
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.tiny.tokenizer import make_tokenizer

TINY = ["--scale", "tiny"]
OWN = [
    *(*TINY, "--chat.system", "Be brief.", "--chat.before", "Calc:", "--tools.use", "python", "own:search"),
    *("--reward.name", "own:graded", "--reward.partial", "--rollout.instruct", "--reward.deadline-s", "3"),
]


def trained(path: Path, *options: str) -> Path:
    """A run directory whose stage 1 is done, asked with these options; the policy's folder."""
    (config,) = parse([STAGE_1], [*options, "--run-dir", str(path)])
    with RunDir.open(path, "stage1", asdict(config)) as run_dir:
        with run_dir.write_checkpoint("stage1", 2) as folder:
            (folder / "model").mkdir()
            (folder / "model" / "config.json").write_text('{"max_position_embeddings": 2048}')
            make_tokenizer().save_pretrained(str(folder / "model"))
        run_dir.finish_stage("stage1", 2)
    return path / "checkpoints" / "stage1-step-000002" / "model"


def asked(*options: str) -> RunConfig:
    return parse([EVALUATE], [*options])[0]


@pytest.mark.long
def test_every_setting_that_differs_has_a_line_whose_option_asks_as_before(tmp_path: Path):
    model = trained(tmp_path / "run", *OWN)
    lines = asked_otherwise(model, asked(*TINY))
    there = f"this asks otherwise than stage1 of {tmp_path / 'run'} did, with "
    assert lines == [
        there + "--rollout.no-instruct; to ask as it did give --rollout.instruct",
        there + "--chat.system ''; to ask as it did give --chat.system 'Be brief.'",
        there + "--chat.before ''; to ask as it did give --chat.before Calc:",
        there + "--reward.name math; to ask as it did give --reward.name own:graded",
        there + "--reward.no-partial; to ask as it did give --reward.partial",
        there + "--tools.use python; to ask as it did give --tools.use python own:search",
    ]
    options = [word for line in lines for word in shlex.split(line.partition(" give ")[2])]
    assert asked_otherwise(model, asked(*TINY, *options)) == []


def test_what_only_trains_or_evaluates_is_none_of_it(tmp_path: Path):
    model = trained(tmp_path / "run", *TINY)
    other = ["--evaluate.samples", "2", "--reward.processes", "1", "--sandbox.time-limit-s", "2", "--own-folder", "x"]
    assert asked_otherwise(model, asked(*TINY, *other)) == []


def test_a_long_text_is_named_by_where_it_stands(tmp_path: Path):
    model = trained(tmp_path / "run", *TINY, "--chat.system", "long " * 100)
    (line,) = asked_otherwise(model, asked(*TINY))
    assert line.endswith(f"give --chat.system as {tmp_path / 'run' / 'config.json'} has it")


def test_who_talks_with_a_policy_is_told_of_what_a_talk_has_too(tmp_path: Path):
    model = trained(tmp_path / "run", *OWN, "--tools.environment", "own:game")
    now = TalkConfig(chat=ChatConfig(before="Calc:"), tools=ToolsConfig(use=("python", "own:search")))
    (line,) = asked_otherwise(model, now, but=("tools.environment",))
    assert line.endswith("--chat.system 'Be brief.'")


@pytest.mark.long
async def test_in_a_talk_it_is_told_beside_the_answer_before_the_engine_comes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def settings(*_: object) -> None:
        raise Enough("that will do")

    model = trained(tmp_path / "run", *TINY, "--chat.before", "Calc:")
    monkeypatch.setattr("actors.generation.settings.engine_settings", settings)
    with pytest.raises(Enough):
        async with own_talker(str(model), TalkConfig()):
            pass
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("give --chat.before Calc:\n")


def test_a_folder_that_no_run_wrote_is_nobodys(tmp_path: Path):
    (tmp_path / "model").mkdir()
    assert stage_of(tmp_path / "model") is None and asked_otherwise(tmp_path / "model", RunConfig()) == []
    model = trained(tmp_path / "run", *OWN)
    assert stage_of(model.parent) is None and stage_of(model) == (RunDir(tmp_path / "run"), "stage1")
    (tmp_path / "run" / "config.json").rename(tmp_path / "elsewhere.json")
    assert asked_otherwise(model, RunConfig()) == []


def test_a_stage_that_had_no_such_setting_yet_says_nothing_of_it(tmp_path: Path):
    model = trained(tmp_path / "run", *TINY)
    text = (tmp_path / "run" / "config.json").read_text()
    (tmp_path / "run" / "config.json").write_text(text.replace('"before"', '"older"'))
    assert asked_otherwise(model, asked(*TINY, "--chat.before", "Calc:")) == []


@pytest.mark.parametrize("name", [name for name in leaves(RunConfig()) if name.partition(".")[0] in ("chat", "tools")])
def test_a_value_is_spelled_as_the_command_line_takes_it(name: str):
    default = leaves(RunConfig())[name]
    other = {str: "a b:c", int: 7, bool: not default}.get(type(default), ("a:b", "c:d"))
    limited = {"chat.thinking": "on", "chat.protocol": "rstar2-agent-14b", "tools.environment": "a:b"}
    other = limited.get(name, other)
    for value in (default, other):
        (config,) = parse([EVALUATE], [*TINY, *shlex.split(spelled(name, value))])
        assert leaves(config)[name] == value


class Enough(RStarError): ...


@pytest.mark.parametrize("what", ["the next stage", "an evaluation"])
def test_it_is_told_before_anything_starts(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def connected() -> None:
        raise Enough("that will do")

    monkeypatch.setattr("recipes.session.connect", connected)
    trained(tmp_path / "run", *TINY, "--chat.before", "Calc:")
    options = [*TINY, "--run-dir", str(tmp_path / "run"), "--rollout.instruct"]
    if what == "the next stage":
        with pytest.raises(Enough):
            run(parse([STAGE_2], options))
    else:
        with pytest.raises(SystemExit, match="1"):
            launch_evaluation(EVALUATE, options)
    said = capsys.readouterr().out
    assert "asks otherwise than stage1" in said and "give --chat.before Calc:\n" in said
    assert "give --rollout.no-instruct\n" in said


def test_a_run_goes_on_whatever_was_given_that_changes_nothing_in_its_mode(tmp_path: Path):
    """Options that mean nothing are refused: a run that was begun with one could never go on."""
    begun = with_values(RunConfig(), {"algorithm.resample": "none", "algorithm.rollouts_per_prompt": 16})
    with session._open(tmp_path, begun):
        pass
    with session._open(tmp_path, with_values(begun, {"algorithm.rollouts_per_prompt": 32})):
        pass
    for other in ({"algorithm.resample": "paper"}, {"algorithm.keep": 3}):
        with (
            pytest.raises(ConfigError, match="belongs to another configuration"),
            session._open(tmp_path, with_values(begun, other)),
        ):
            pass
