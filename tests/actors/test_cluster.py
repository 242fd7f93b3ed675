"""Starting and stopping a head of our own, as far as it goes without one."""

import json
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.cluster import __main__ as cluster
from actors.cluster.gpu_environment import DEPLOY, read_env_file
from actors.cluster.process_start import birth
from rstar_ray.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def record(pid: int, born: str) -> None:
    cluster.STATE.mkdir()
    (cluster.STATE / "head.json").write_text(json.dumps({"pid": pid, "birth": born}))


def test_the_heads_jobs_need_its_token_unless_a_person_asked_for_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert cluster.cluster_environment(Path("/runs"))["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert cluster.cluster_environment(Path("/runs"))["RAY_AUTH_MODE"] == "disabled"


def test_jobs_find_the_runs_folder_and_this_environments_programs():
    environment = cluster.cluster_environment(Path("/runs"))
    assert environment["RSTAR_RAY_RUNS"] == "/runs"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_a_job_that_is_stopped_has_its_grace_and_a_minute_unless_a_person_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv(cluster.STOP_WAIT, raising=False)
    assert cluster.cluster_environment(Path("/runs"))[cluster.STOP_WAIT] == "180"
    for kind in ("rocm", "cuda"):
        assert read_env_file(DEPLOY / f"{kind}.env").values[cluster.STOP_WAIT] == "180"
    monkeypatch.setenv(cluster.STOP_WAIT, "7")
    assert cluster.cluster_environment(Path("/runs"))[cluster.STOP_WAIT] == "7"


def test_a_head_has_started_when_ray_says_so_in_these_words():
    ray = find_spec("ray")
    assert ray is not None and ray.origin is not None
    assert f'"{cluster.STARTED}"' in (Path(ray.origin).parent / "scripts/scripts.py").read_text()


def test_a_taken_port_is_refused_by_its_number_and_a_free_one_is_not():
    with socket.socket() as listener:
        listener.bind((cluster.HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: it is in use"):
            cluster.refuse_taken_port(port)
    cluster.refuse_taken_port(port)
    for none in (0, -1, 65536):
        with pytest.raises(ConfigError, match="is no port; give 1 to 65535"):
            cluster.refuse_taken_port(none)


def test_a_free_port_is_one_that_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("", cluster.free_port()))
        listener.listen()


def test_a_second_head_is_refused_while_the_first_is_up():
    record(os.getpid(), birth(os.getpid()))
    with pytest.raises(ConfigError, match="it is up already; run `make cluster-down` first"):
        cluster.up()


def test_only_the_very_process_that_was_recorded_is_stopped(capsys: pytest.CaptureFixture[str]):
    """A process id is given again: what was started at another time is somebody else's."""
    record(os.getpid(), f"{birth(os.getpid())}0")
    cluster.down()
    assert capsys.readouterr().out == "no cluster of this folder is up\n"


@pytest.mark.parametrize("written", ["", "{", '{"pid": 1}'])
def test_a_damaged_record_names_no_head(written: str, capsys: pytest.CaptureFixture[str]):
    cluster.STATE.mkdir()
    (cluster.STATE / "head.json").write_text(written)
    cluster.down()
    assert "no cluster" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["sideways"], ["up", "a.yaml", "b.yaml"]])
def test_anything_but_up_and_down_is_told_the_usage(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["cluster", *arguments])
    assert cluster.main() == 2
    assert "usage: python -m actors.cluster up|down" in capsys.readouterr().err


def test_a_refusal_is_one_line_and_a_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    record(os.getpid(), birth(os.getpid()))
    monkeypatch.setattr(sys, "argv", ["cluster", "up"])
    assert cluster.main() == 1
    assert capsys.readouterr().err == "cluster: it is up already; run `make cluster-down` first\n"
