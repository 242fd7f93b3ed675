"""The folder that a run starts from where it makes its own: whole, or not there."""

from pathlib import Path

import pytest

from actors.launch import start_model as model
from actors.launch.start_model import start_model
from tests import derived


class Killed(BaseException):
    """What no handler of a fault takes for one."""


def test_a_model_given_by_a_relative_path_is_known_by_its_absolute_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    config = model.with_local_model(derived.small_config(scale="tiny", model="base"))
    assert config.model == str(tmp_path / "base")


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
