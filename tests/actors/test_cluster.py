"""Starting and stopping a separate head, as far as it goes without one."""

import json
import os
import socket
from pathlib import Path

import pytest

from actors.cluster import __main__ as cluster
from actors.cluster.process_start import start_time
from rstar_ray.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_separate_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def record(pid: int, started: str) -> None:
    cluster.STATE.mkdir()
    (cluster.STATE / "head.json").write_text(json.dumps({"pid": pid, "birth": started}))


def test_the_heads_jobs_need_its_token_unless_a_person_asked_for_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert cluster.cluster_environment(Path("/runs"))["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert cluster.cluster_environment(Path("/runs"))["RAY_AUTH_MODE"] == "disabled"


def test_a_taken_port_is_refused_by_its_number_and_a_free_one_is_not():
    with socket.socket() as listener:
        listener.bind((cluster.HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: it is in use"):
            cluster.refuse_taken_port(port)
    cluster.refuse_taken_port(port)
    for none in (0, -1, 65536):
        with pytest.raises(ConfigError, match=r"is not a port. Hint: give 1 to 65535"):
            cluster.refuse_taken_port(none)


def test_a_second_head_is_refused_while_the_first_is_up():
    record(os.getpid(), start_time(os.getpid()))
    with pytest.raises(ConfigError, match=r"it is up already. Hint: run `make cluster-down` first"):
        cluster.up()


def test_only_the_very_process_that_was_recorded_is_stopped(capsys: pytest.CaptureFixture[str]):
    """A process id is given again: what was started at another time is somebody else's."""
    record(os.getpid(), f"{start_time(os.getpid())}0")
    cluster.down()
    assert capsys.readouterr().out == "no cluster of this folder is up\n"


@pytest.mark.parametrize("written", ["", "{", '{"pid": 1}'])
def test_a_damaged_record_names_no_head(written: str, capsys: pytest.CaptureFixture[str]):
    cluster.STATE.mkdir()
    (cluster.STATE / "head.json").write_text(written)
    cluster.down()
    assert "no cluster" in capsys.readouterr().out
