"""Processes that outlive their command: one that does not come up is ended, and no other."""

import sys
from pathlib import Path
from urllib.request import Request

import pytest

from actors.cluster.__main__ import free_port
from actors.cluster.recorded_processes import Sign, end, recorded, start
from rstar_ray.errors import DeadlineExceeded

SERVES = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def _asked(port: int, says: str = "") -> Sign:
    return Sign(Request(f"http://127.0.0.1:{port}/"), says)


def test_one_that_answers_continues_until_it_is_ended(tmp_path: Path):
    path, port = tmp_path / "one.json", free_port()
    start(path, [sys.executable, "-c", SERVES, str(port)], _asked(port), log=tmp_path / "log", deadline_s=30)
    process = recorded(path)
    assert process is not None and process.is_running()
    end(path, process)
    assert recorded(path) is None and not process.is_running()


@pytest.mark.long
def test_one_that_does_not_answer_in_time_is_ended(tmp_path: Path):
    path = tmp_path / "one.json"
    pid_file = tmp_path / "pid"
    command = ["/bin/sh", "-c", f"echo $$ > {pid_file}; exec sleep 60"]
    with pytest.raises(DeadlineExceeded, match="sh waited 1 s for an answer"):
        start(path, command, _asked(free_port()), log=tmp_path / "log", deadline_s=1)
    assert recorded(path) is None and not path.exists()
    state = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
