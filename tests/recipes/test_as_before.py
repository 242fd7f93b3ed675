"""What differs between the stage that made a policy and today's settings is logged, with the option to use."""

from dataclasses import asdict
from pathlib import Path

import pytest

from actors.launch.command_line import parse
from actors.launch.evaluation import launch_evaluation
from actors.launch.run import run
from actors.talk.talker import TalkConfig, own_talker
from recipes.evaluate import EVALUATE
from recipes.stage1 import STAGE_1
from recipes.stage2 import STAGE_2
from rstar_ray.config import RunConfig
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.tiny.tokenizer import make_tokenizer
from tests.fakes import Enough, enough

TINY = ["--scale", "tiny"]


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
async def test_in_a_talk_it_is_shown_beside_the_answer_before_the_engine_comes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = trained(tmp_path / "run", *TINY, "--chat.before", "Calc:")
    monkeypatch.setattr("actors.generation.served_adapter.adapter_to_serve", enough)
    with pytest.raises(Enough):
        async with own_talker(str(model), TalkConfig()):
            pass
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("give --chat.before Calc:\n")


@pytest.mark.parametrize("what", ["the next stage", "an evaluation"])
def test_it_is_logged_before_anything_starts(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
):
    for command in ("run", "evaluation"):
        monkeypatch.setattr(f"actors.launch.{command}.connect", enough)
    trained(tmp_path / "run", *TINY, "--chat.before", "Calc:")
    options = [*TINY, "--run-dir", str(tmp_path / "run"), "--rollout.instruct"]
    if what == "the next stage":
        with pytest.raises(Enough):
            run(parse([STAGE_2], options))
    else:
        with pytest.raises(SystemExit, match="1"):
            launch_evaluation(EVALUATE, options)
    said = "\n".join(logged) + "\n"
    assert "differs from stage1" in said and "give --chat.before Calc:\n" in said
    assert "give --rollout.no-instruct\n" in said
