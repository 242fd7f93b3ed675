"""What can be known of the files that a person brings is said, or refused, before Ray starts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from actors.launch.command_line import parse
from actors.launch.datasets import training_problems
from actors.launch.evaluation import launch_evaluation
from actors.launch.run import launch, run
from recipes.evaluate import EVALUATE
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from recipes.stage2 import STAGE_2
from rstar_ray.config import may_change, with_values
from rstar_ray.data.order import digest_of_problems
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import write_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.stage_progress import StageProgress
from rstar_ray.tiny.tokenizer import make_tokenizer
from tests.fakes import Enough, enough
from tests.rstar_ray.fabricate import write_rows

pytestmark = pytest.mark.usefixtures("without_fsync", "goes_no_further")
TINY = ["--scale", "tiny"]
SAID = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}


@pytest.fixture
def goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("run", "evaluation"):
        monkeypatch.setattr(f"actors.launch.{command}.connect", enough)


def problems(count: int, *lengths: int) -> list[dict[str, str]]:
    """The first of them as long as is said."""
    texts = ["7" * length for length in lengths] + ["1 + 1?"] * (count - len(lengths))
    return [{"id": f"p{number}", "problem": text, "answer": "2"} for number, text in enumerate(texts)]


def stage_1(tmp_path: Path, all_rows: Sequence[Any], *more: str) -> list[str]:
    """Options of a stage that trains on these."""
    return [
        *TINY,
        "--run-dir",
        str(tmp_path / "run"),
        "--data.train",
        str(write_rows(tmp_path / "mine.jsonl", *all_rows)),
        *more,
    ]


@pytest.mark.parametrize(
    ("setting", "option"),
    [({"staleness": 1}, "--staleness: "), ({"algorithm.correction": "token"}, r"--algorithm\.cor")],
)
def test_stages_of_one_launch_have_one_loss(setting: dict[str, Any], option: str, tmp_path: Path):
    first, second = parse([STAGE_1, STAGE_2], [*TINY, "--run-dir", str(tmp_path / "run")])
    with pytest.raises(ConfigError, match=f"^{option}.*stage2 has .*, and stage1 of the same launch"):
        run([first, with_values(second, setting)])
    assert not (tmp_path / "run").exists()


def test_a_context_too_short_for_more_than_a_few_is_refused(tmp_path: Path):
    options = stage_1(tmp_path, problems(60, 5_000, 3_000, 4_000, 5_000))
    with pytest.raises(
        ConfigError, match=r"^--engine\.max-context-tokens: 4 of 60 prompts .* in mine\.jsonl. Hint: raise it, or"
    ):
        run(parse([STAGE_1], options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("", r"mine\.jsonl, problem 'game': its environment 'own_environment:Mastermind' is not among --tools\.env"),
        ("--tools.environments own_environment:Nothing", r"--tools\.environments .*Nothing"),
        (
            "--tools.environments own_environment:Mastermind --data.mix rare=1",
            r"--data\.mix: no problem has the family",
        ),
        ("--data.mix rare=1 other=2 --data.mix-floor 100", r"--data\.mix-floor: 100 per source are 200 problems"),
    ],
)
def test_environments_and_sources_that_are_not_there_are_refused(tmp_path: Path, options: str, refused: str):
    game = {"id": "game", "problem": "Guess.", "environment": "own_environment:Mastermind", "family": "game"}
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    with pytest.raises(ConfigError, match=refused):
        asked = stage_1(tmp_path, [*problems(5), game], "--own-folder", folder, *options.split())
        run(parse([STAGE_1], asked))
    assert not (tmp_path / "run").exists()


def none_wrong(*_: object, **__: object) -> None:
    """Of a model's weights: it has none here."""


def test_of_what_is_evaluated_on_nothing_is_left_out_and_a_line_says_what_counts_as_wrong(
    tmp_path: Path, logged: list[str]
):
    exam = str(write_rows(tmp_path / "exam.jsonl", *problems(3, 5_000)))
    with pytest.raises(Enough):
        run(parse([STAGE_1], stage_1(tmp_path, problems(3), "--data.heldout", exam)))
    line = ": 1 of 3 prompts do not fit into a context of 2048 tokens, such as that of problem 'p0' with "
    assert f"held-out{line}" in (said := "\n".join(logged)) and "they count as wrong" in said
    model = tmp_path / "model"
    make_tokenizer().save_pretrained(str(model))
    (model / "config.json").write_text('{"max_position_embeddings": 2048, "vocab_size": 4096}')
    place = ["--run-dir", str(tmp_path / "run"), "--model", str(model)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="1"):
        for name in ("refuse_misfit", "refuse_unpacked"):
            patch.setattr(f"actors.weights.model_parameters.{name}", none_wrong, raising=False)
        launch_evaluation(EVALUATE, [*TINY, *place, "--evaluate.files", exam])
    assert f"exam{line}" in "\n".join(logged)


def begun(config: Any, data: str) -> None:
    """As a stage that was stopped after its second step leaves it."""
    with (
        RunDir.open(config.run_dir, config.stage, asdict(config), may_differ=may_change(config)) as run_dir,
        run_dir.write_checkpoint(config.stage, 2) as folder,
    ):
        write_json(folder / "progress.json", StageProgress(step=2, data=data).as_json())


def test_a_served_reference_model_may_have_another_address_after_a_resume(tmp_path: Path):
    def stage(reference: str) -> list[str]:
        options = ["--algorithm.kl-coefficient", "0.1", "--algorithm.reference-model", reference]
        return stage_1(tmp_path, problems(9), *options)

    (config,) = parse([STAGE_1], stage("http://127.0.0.1:8100"))
    begun(config, digest_of_problems(training_problems(config)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.learner.served_reference.refuse_unfit", none_wrong)
        with pytest.raises(Enough):
            run(parse([STAGE_1], stage("http://127.0.0.1:8200")))
        with pytest.raises(ConfigError, match=r"another configuration \(algorithm.clip_high: 0.28 there, 0.5 now\)"):
            run(parse([STAGE_1], [*stage("http://127.0.0.1:8200"), "--algorithm.clip-high", "0.5"]))


def test_a_stage_that_lacks_its_evaluation_alone_is_refused_where_its_end_is_damaged(tmp_path: Path):
    exam = str(write_rows(tmp_path / "exam.jsonl", *problems(3)))
    (config,) = parse([STAGE_1], stage_1(tmp_path, problems(9), "--data.heldout", exam))
    begun(config, digest_of_problems(training_problems(config)))
    run_dir = RunDir(tmp_path / "run")
    run_dir.finish_stage("stage1", 2)
    with pytest.raises(Enough):
        run([config])
    end = run_dir.checkpoints_path / "stage1-step-000002"
    note = end / "progress.json"
    note.write_text(" " + note.read_text()[:-1])  # of the same size
    with pytest.raises(ConfigError) as refused:
        run([config])
    assert str(refused.value) == (
        f"--run-dir: {end}, where stage1 ended, is damaged: progress.json is damaged: its checksum "
        f"differs. Hint: restore it from a backup, or delete {run_dir.path / 'finished' / 'stage1.json'} "
        "to train the rest of the stage again"
    )


def sft_options(tmp_path: Path, count: int, *more: str) -> list[str]:
    said = write_rows(tmp_path / "said.jsonl", *[SAID] * count)
    return [*TINY, "--run-dir", str(tmp_path / "run"), "--sft.data", str(said), "--sft.batch-size", "8", *more]


@pytest.mark.long
def test_sft_is_as_long_as_somebody_chose_or_no_longer_than_its_file_bears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        launch([SFT], sft_options(tmp_path, 40))
    refused = "--sft.steps: it is not given, and 1000 steps of 8 are 222 epochs of the 36 rows of said.jsonl"
    assert refused in capsys.readouterr().err and not (tmp_path / "run").exists()
    for steps in (["--sft.steps", "1000"], ["--sft.steps=1000"]):
        with pytest.raises(SystemExit, match="1"):
            launch([SFT], sft_options(tmp_path, 40, *steps))
        assert (
            "1,000 steps of 8 are 222.2 epochs of the 36 rows to train on; --sft.steps 14 makes 3"
            in capsys.readouterr().out
        )
