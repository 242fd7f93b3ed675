"""Who may talk to Ray: the token is made, kept private and asked for; `disabled` is warned about."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.cluster import auth
from rstar_ray.errors import ConfigError


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary directory whose path leaves room for sockets, as pytest's own do not."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def a_separate_home(tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(short))
    for name in (auth.DIRECTORY_VARIABLE, auth.MODE_VARIABLE, auth.TOKEN_VARIABLE, auth.PATH_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_by_default_a_new_token_is_required_that_only_its_owner_can_read(logged: list[str]):
    assert auth.require_token_auth()
    path = auth.default_token_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.environ[auth.MODE_VARIABLE] == "token" and len(auth.the_token()) == 64 and not logged
    made = auth.the_token()
    assert auth.require_token_auth() and auth.the_token() == made  # the next run takes the same
    assert [file.name for file in path.parent.iterdir()] == ["auth_token"]


def test_disabled_is_asked_for_by_name_and_warned_about(monkeypatch: pytest.MonkeyPatch, logged: list[str]):
    monkeypatch.setenv(auth.MODE_VARIABLE, "disabled")
    assert not auth.require_token_auth()
    assert "can run code here as you" in logged[0]
    assert not auth.default_token_path().exists()


def test_a_mode_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(auth.MODE_VARIABLE, "off")
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE: 'off' is not a mode. Hint: unset it"):
        auth.require_token_auth()


def test_a_token_that_others_can_read_becomes_private_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
):
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o644)
    monkeypatch.setenv(auth.PATH_VARIABLE, str(path))
    assert auth.require_token_auth()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "was readable by others (mode 644)" in logged[0]
    assert auth.the_token() == "secret"


@pytest.mark.parametrize(("written", "problem"), [(None, "No such file"), ("  \n", "is empty")])
def test_a_named_token_that_is_missing_or_empty_is_refused(
    written: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "token"
    if written is not None:
        path.write_text(written)
    monkeypatch.setenv(auth.PATH_VARIABLE, str(path))
    with pytest.raises(ConfigError, match=problem):
        auth.require_token_auth()


@pytest.mark.parametrize("home", ["/proc", "/dev/null"])
def test_a_home_without_room_for_the_token_is_refused(home: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", home)
    with pytest.raises(ConfigError, match=rf"token: {home}/.ray/auth_token cannot be written .*set HOME"):
        auth.require_token_auth()


def test_a_token_file_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    monkeypatch.setenv(auth.PATH_VARIABLE, str(tmp_path / "token"))
    with pytest.raises(ConfigError, match=r"token cannot be read \(UnicodeDecodeError"):
        auth.require_token_auth()


def test_an_empty_token_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(auth.TOKEN_VARIABLE, " ")
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN: it is empty"):
        auth.require_token_auth()


# ---------------------------------------------------------------- Ray's directory
def test_ray_gets_a_directory_that_only_its_user_can_enter(short: Path, monkeypatch: pytest.MonkeyPatch):
    auth.require_token_auth()
    directory = Path(os.environ["RAY_TMPDIR"])
    assert directory.parent == short and stat.S_IMODE(directory.stat().st_mode) == 0o700
    monkeypatch.delenv("RAY_TMPDIR")
    directory.chmod(0o755)  # as Ray leaves a directory that it creates
    assert auth.private_directory() == directory and stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_of_another_user_or_a_link_is_refused(short: Path):
    directory = short / f"ray-{os.geteuid()}"
    (short / "elsewhere").mkdir()
    directory.symlink_to(short / "elsewhere")
    with pytest.raises(ConfigError, match=r"RAY_TMPDIR: .* is not a directory of user"):
        auth.private_directory()
    directory.unlink()
    if os.geteuid() == 0:
        directory.mkdir()
        os.chown(directory, 12345, 12345)
        with pytest.raises(ConfigError, match=r"RAY_TMPDIR: .* is not a directory of user 0"):
            auth.private_directory()


def test_a_named_directory_must_be_private_and_leave_room_for_sockets(short: Path, monkeypatch: pytest.MonkeyPatch):
    shared = short / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    for path, problem in ((shared, r"other users can enter .* \(mode 755\)"), (short / ("x" * 60), "too long")):
        monkeypatch.setenv("RAY_TMPDIR", str(path))
        with pytest.raises(ConfigError, match=f"RAY_TMPDIR: .*{problem}"):
            auth.private_directory()
    shared.chmod(0o700)
    monkeypatch.setenv("RAY_TMPDIR", str(shared))
    assert auth.private_directory() == shared


def test_a_cluster_that_is_joined_keeps_its_own_directory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("RAY_TMPDIR", "/")
    assert auth.require_token_auth()
