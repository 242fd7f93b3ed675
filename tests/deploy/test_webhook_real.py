"""What is measured wakes a person: a real Prometheus judges the shipped rules, a real Alertmanager calls a webhook."""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.__main__ import HOST, free_port
from actors.cluster.dashboards import DEPLOYED, DISCOVERY

PROGRAMS = {
    name: shutil.which(name) for name in ("prometheus", "prometheus-alertmanager")
}  # both are Debian packages of the same name
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not all(PROGRAMS.values()), reason="needs prometheus and prometheus-alertmanager (Debian)"),
]
HEALTHY, DRIFTED = 1e-7, 0.2
DEADLINE_S = 120.0


class Run(BaseHTTPRequestHandler):
    """Stands for a node of a run at /metrics, and for somebody's pager at /alert."""

    drift = HEALTHY
    called: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer(f'ray_rstar_logprob_diff_mean{{run="night",stage="stage1"}} {self.drift}\n'.encode())

    def do_POST(self) -> None:
        self.called.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def run() -> Iterator[tuple[type[Run], int]]:
    handler = type("Handler", (Run,), {"called": []})
    server = ThreadingHTTPServer((HOST, 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def hasty(name: str, **changed: str) -> str:
    """A shipped file with its waits cut to a second, and addresses of this test in place of those shipped."""
    text = (DEPLOYED / "prometheus" / name).read_text()
    text = re.sub(r"\b(for|group_wait|scrape_interval|evaluation_interval): \d+[smh]", r"\1: 1s", text)
    for old, new in changed.items():
        assert old in text, f"{name} has no {old}"
        text = text.replace(old, new)
    return text


@pytest.fixture
def pager(tmp_path: Path, run: tuple[type[Run], int]) -> Iterator[type[Run]]:
    """Prometheus and Alertmanager as shipped, but for their haste; gives the webhook's calls."""
    handler, port = run
    prometheus, alertmanager = free_port(), free_port()
    (tmp_path / "nodes.json").write_text(json.dumps([{"targets": [f"{HOST}:{port}"]}]))
    (tmp_path / "alerts.yml").write_text(hasty("alerts.yml"))
    moved = {DISCOVERY: str(tmp_path / "nodes.json"), "127.0.0.1:9093": f"{HOST}:{alertmanager}"}
    (tmp_path / "prometheus.yml").write_text(hasty("prometheus.yml", **moved))
    (tmp_path / "alertmanager.yml").write_text(
        hasty("alertmanager.yml", **{"http://127.0.0.1:9095/alert": f"http://{HOST}:{port}/alert"}).replace(
            "repeat_interval", "group_interval: 1s\n  repeat_interval"
        )
    )
    commands = [
        [PROGRAMS["prometheus-alertmanager"], f"--config.file={tmp_path / 'alertmanager.yml'}",
         f"--storage.path={tmp_path / 'alerts'}", f"--web.listen-address={HOST}:{alertmanager}",
         "--cluster.listen-address="],
        [PROGRAMS["prometheus"], f"--config.file={tmp_path / 'prometheus.yml'}",
         f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={HOST}:{prometheus}"],
    ]  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    with (tmp_path / "log").open("wb") as log:
        try:
            for command in commands:
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
            for port_of in (alertmanager, prometheus):
                until(lambda port_of=port_of: ready(port_of), f"port {port_of}: see {tmp_path / 'log'}")
            yield handler
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(30)


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/-/ready", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def until(happened: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_an_alert_reaches_the_webhook_with_what_it_saw_and_the_fix_and_so_does_its_end(pager: type[Run]):
    def alerts(status: str) -> list[dict[str, Any]]:
        return [one for call in pager.called for one in call["alerts"] if one["status"] == status]

    time.sleep(5)
    assert pager.called == [], "nobody is woken while the run is healthy"
    pager.drift = DRIFTED
    until(lambda: alerts("firing"), "the webhook was not called")
    (alert,) = {one["labels"]["alertname"]: one for one in alerts("firing")}.values()
    assert alert["labels"] == alert["labels"] | {"alertname": "LogprobDrift", "run": "night", "severity": "page"}
    assert alert["annotations"]["summary"] == "night: learner and engines differ by 200m nats per token"
    assert "compare ray_rstar_engine_policy_version" in alert["annotations"]["fix"]
    pager.drift = HEALTHY
    until(lambda: alerts("resolved"), "its end was not reported")
