"""Who may talk to Ray: the token is made, kept private and asked for; `disabled` is warned about."""

import os
import stat
from pathlib import Path

import pytest

from actors import door
from rstar_ray.errors import ConfigError


@pytest.fixture(autouse=True)
def a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (door.MODE_VARIABLE, door.TOKEN_VARIABLE, door.PATH_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_without_a_word_the_door_is_shut_with_a_new_token_that_only_its_owner_can_read():
    shown: list[str] = []
    assert door.shut_door(shown.append)
    path = door.default_token_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.environ[door.MODE_VARIABLE] == "token" and len(door.the_token()) == 64 and not shown
    made = door.the_token()
    assert door.shut_door(shown.append) and door.the_token() == made  # the next run takes the same
    assert [file.name for file in path.parent.iterdir()] == ["auth_token"]


def test_an_empty_token_is_made_anew():
    path = door.default_token_path()
    path.parent.mkdir()
    path.touch()
    assert door.shut_door(print) and len(door.the_token()) == 64


def test_disabled_is_asked_for_by_name_and_warned_about(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(door.MODE_VARIABLE, "disabled")
    shown: list[str] = []
    assert not door.shut_door(shown.append)
    assert "can run code here as you" in shown[0]
    assert not door.default_token_path().exists()


def test_a_mode_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(door.MODE_VARIABLE, "off")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE: 'off' is no mode; unset it, or give token or disabled"):
        door.shut_door(print)


def test_a_token_that_others_can_read_becomes_private_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o644)
    monkeypatch.setenv(door.PATH_VARIABLE, str(path))
    shown: list[str] = []
    assert door.shut_door(shown.append)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "was readable by others (mode 644)" in shown[0]
    assert door.the_token() == "secret"


@pytest.mark.parametrize(("written", "problem"), [(None, "No such file"), ("  \n", "is empty")])
def test_a_named_token_that_is_missing_or_empty_is_refused(
    written: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "token"
    if written is not None:
        path.write_text(written)
    monkeypatch.setenv(door.PATH_VARIABLE, str(path))
    with pytest.raises(ConfigError, match=problem):
        door.shut_door(print)


def test_an_empty_token_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(door.TOKEN_VARIABLE, " ")
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN: it is empty"):
        door.shut_door(print)
