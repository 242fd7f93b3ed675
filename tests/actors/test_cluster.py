"""Starting and stopping a separate head, as far as it goes without one."""

import json
import os
import socket
import sys
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


SLOW_RAY = """#!{python}
import http.server, pathlib, sys
tries = pathlib.Path("tries")
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
if len(tries.read_text()) <= {slow}:
    sys.exit("Exception: The current node timed out during startup. {rest}")
port = int(next(one for one in sys.argv if one.startswith("--dashboard-port=")).split("=")[1])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", port), Answer)
print("Ray runtime started.", flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("slow", [1, 3])
def test_a_node_that_starts_slowly_is_started_again(
    slow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fake = tmp_path / "bin" / "ray"
    fake.parent.mkdir()
    fake.write_text(SLOW_RAY.format(python=sys.executable, slow=slow, rest="Some raylet."))
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(cluster, "DASHBOARD_PORT", cluster.free_port())
    if slow < cluster.START_ATTEMPTS:
        cluster.up()
        assert "cluster up: dashboard" in capsys.readouterr().out
        cluster.down()
    else:
        with pytest.raises(
            ConfigError, match=r"ray: it ended: .*timed out during startup.*Hint: see .cluster/head.log"
        ):
            cluster.up()
    assert Path("tries").read_text() == "." * min(slow + 1, cluster.START_ATTEMPTS)
