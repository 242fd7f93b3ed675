"""`rstar export`: which checkpoint is taken, what the folder holds, and what goes to the hub."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import yaml

from recipes.export import main
from recipes.stage1 import STAGE_1
from rstar_ray.config import with_values
from rstar_ray.config.scales import at_scale
from rstar_ray.run_dir.durable import append_row, read_rows, write_json
from rstar_ray.run_dir.folder import RunDir
from tests.rstar_ray.fabricate import run_directory

pytestmark = pytest.mark.usefixtures("without_fsync")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with three checkpoints of stage 1, evaluated at each; no token of a hub."""
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    path = run_directory(tmp_path / "run", stages={"stage1": 30})
    hub = tmp_path / "models--Qwen--Qwen3-1.7B" / "snapshots" / "0123"
    config = with_values(at_scale(STAGE_1.paper, "tiny", STAGE_1.tiny), {"model": str(hub), "seed": 7})
    write_json(path / "config.json", {"stage1": asdict(config)})
    run_dir = RunDir(path)
    for step in (10, 20, 30):
        with run_dir.write_checkpoint("stage1", step) as folder:
            (folder / "model").mkdir()
            (folder / "model" / "model.safetensors").write_text(f"weights {step}")
            write_json(folder / "progress.json", {"step": step, "data": "0123456789abcdef"})
    return path


def scored(path: Path, **scores: float) -> None:
    """As an evaluation of the run writes them: the fabricated row of the stage's end, with other scores."""
    (path / "evaluations.jsonl").rename(path / "old.jsonl")
    row = next(row for row in read_rows(path / "old.jsonl") if row["set"] == "held-out")
    for step, score in scores.items():
        append_row(path / "evaluations.jsonl", {**row, "stage": "stage1", "step": int(step[1:]), "avg_at_k": score})


def card(folder: Path) -> tuple[dict[str, Any], str]:
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_best_checkpoint_is_exported_with_a_card_from_the_run_directory(run: Path):
    scored(run, s10=0.41, s20=0.83, s30=0.62)
    assert main([str(run)]) == 0
    folder = run / "export" / "stage1-step-000020"
    assert (folder / "model.safetensors").read_text() == "weights 20"
    front, text = card(folder)
    assert front["base_model"] == "Qwen/Qwen3-1.7B" and front["license"] == "unknown"
    assert "83.0 %" in text and "41.0 %" not in text and "optimistic" in text
    assert "digest 0123456789ab" in text and "seed = 7" in text
    assert "| Stage 1 | 20 |" in text  # the steps of these weights, not of the run
    assert str(run.parent) not in text  # no path of this machine


def test_evaluations_by_a_relative_path_are_in_the_card(run: Path, monkeypatch: pytest.MonkeyPatch):
    scored(run, s10=0.41, s20=0.83)
    monkeypatch.chdir(run.parent)
    row = read_rows(run / "evaluations.jsonl")[-1]
    model = "run/checkpoints/stage1-step-000020/model"
    asked = {"stage": "evaluate", "step": 0, "set": "aime", "model": model, "avg_at_k": 0.77}
    append_row(run / "evaluations.jsonl", row | asked)
    assert main(["run"]) == 0
    assert "aime" in card(run / "export" / "stage1-step-000020")[1]


def test_without_scores_the_newest_is_exported_and_a_step_can_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "evaluations.jsonl").unlink()
    assert main([str(run), "--to", str(run.parent / "newest")]) == 0
    assert "not evaluated" in card(run.parent / "newest")[1]
    assert (run.parent / "newest" / "model.safetensors").read_text() == "weights 30"
    assert main([str(run), "--step", "10"]) == 0
    assert (run / "export" / "stage1-step-000010" / "model.safetensors").read_text() == "weights 10"
    assert main([str(run), "--step", "15"]) == 2
    assert "choose 10, 20, 30" in capsys.readouterr().err


def test_an_export_of_other_weights_is_not_used_again(run: Path, capsys: pytest.CaptureFixture[str]):
    to = ["--to", str(run.parent / "mine")]
    assert main([str(run), "--step", "10", *to]) == 0
    assert main([str(run), "--step", "10", *to]) == 0
    assert main([str(run), "--step", "20", *to]) == 2
    assert "mine has other weights than stage1-step-000020" in capsys.readouterr().err


def test_a_damaged_checkpoint_and_a_folder_that_is_not_an_export_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
):
    (run / "checkpoints" / "stage1-step-000030" / "model" / "model.safetensors").write_text("w3ights 30")
    assert main([str(run), "--step", "30"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert main([str(run), "--step", "20", "--to", str(run.parent)]) == 2
    assert "--to: " in capsys.readouterr().err
    assert main([str(run), "--step", "20", "--hub", "no-owner"]) == 2


def test_without_a_token_the_files_are_printed_and_with_one_they_are_uploaded_as_the_user_edited_them(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main([str(run), "--step", "20", "--hub", "me/mine"]) == 0
    printed = capsys.readouterr().out
    assert "would be uploaded to me/mine" in printed and "model.safetensors" in printed and "README.md" in printed
    folder = run / "export" / "stage1-step-000020"
    (folder / "README.md").write_text("edited")
    uploaded: list[Any] = []

    def create(name: str, *, private: bool, exist_ok: bool) -> str:
        uploaded.append((name, private, exist_ok))
        return f"https://hub/{name}"

    def send(*, repo_id: str, folder_path: Path, commit_message: str) -> None:
        uploaded.append((repo_id, (Path(folder_path) / "README.md").read_text()))

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "secret")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(create_repo=create, upload_folder=send))
    assert main([str(run), "--step", "20", "--hub", "me/mine"]) == 0
    assert uploaded == [("me/mine", True, True), ("me/mine", "edited")]
    printed = capsys.readouterr().out
    assert "https://hub/me/mine" in printed and "secret" not in printed
