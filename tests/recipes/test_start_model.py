"""The folder that a run starts from where it makes its own: whole, or not there."""

from pathlib import Path

import pytest

from actors.launch import start_model as model
from actors.launch.start_model import start_folder, start_model
from actors.weights.adapter_folder import adapter_beside, write_adapter
from tests import derived


class Killed(BaseException):
    """What no handler of a fault takes for one."""


@pytest.mark.long
def test_a_model_that_a_killed_run_has_half_written_is_made_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kills = [True, False]

    def make(folder: Path, seed: int) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if kills.pop(0):
            raise Killed
        (folder / "model.safetensors").write_text(str(seed))
        return folder

    monkeypatch.setattr(model, "make_tiny_model", make)
    config = derived.small_config(scale="tiny")
    with pytest.raises(Killed):
        start_model(config, tmp_path / "run", None)
    for _ in range(2):  # once it is there it stays
        made = start_model(config, tmp_path / "run", None)
        assert sorted(path.name for path in made.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [made.name]


def test_a_later_stage_with_adapters_starts_from_their_base_if_it_still_exists(tmp_path: Path):
    base, finished = tmp_path / "base", tmp_path / "sft-step-000010"
    base.mkdir()
    (base / "config.json").write_text("{}")
    write_adapter(adapter_beside(finished / "model"), {}, base=str(base), rank=4, alpha=8, targets=["q_proj"])
    adapted = derived.small_config(stage="stage1", learner__lora_rank=4)
    assert start_folder(adapted, tmp_path, finished) == base
    assert start_folder(derived.small_config(stage="stage1"), tmp_path, finished) == finished / "model"
    (base / "config.json").unlink()
    assert start_folder(adapted, tmp_path, finished) == finished / "model"
