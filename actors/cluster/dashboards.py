"""Prometheus for the head of `make cluster-up`: `python -m actors.cluster.dashboards [PORT]` or `make dashboards`.

It scrapes the nodes that Ray's head lists, evaluates the alerts of deploy/prometheus, and listens only on loopback.
`make cluster-down` ends it with the head.
"""

import re
import shutil
import sys
from pathlib import Path
from urllib.request import Request

import psutil

from actors.cluster.__main__ import HEAD, HOST, PROMETHEUS, STATE, refuse_taken_port
from actors.cluster.auth import private_directory
from actors.cluster.recorded_processes import Sign, end, recorded, start
from rstar_ray.errors import ConfigError
from rstar_ray.exit_status import exit_status_of

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy"
DISCOVERY = "/tmp/ray-UID/ray/prom_metrics_service_discovery.json"
"""The list of nodes in deploy/prometheus/prometheus.yml; UID stands for the user who started Ray."""
CONFIG = STATE / "prometheus/prometheus.yml"
PORT = 9090
START_DEADLINE_S = 30.0


def up(port: int = PORT) -> None:
    """Start Prometheus, unless it runs, and print its address. Raises `ConfigError`."""
    program = shutil.which("prometheus")
    if program is None:
        raise ConfigError(
            "dashboards", "there is no program `prometheus` here", "apt-get install prometheus, or put it on PATH"
        )
    head = recorded(HEAD)
    if head is None:
        raise ConfigError("dashboards", "no cluster of this folder is up", "run `make cluster-up` first")
    running = recorded(PROMETHEUS)
    if running is not None:
        port = listens_on(running) or port
        if not CONFIG.exists() or discovery_file(head) not in CONFIG.read_text():  # it scrapes a head that has died
            end(PROMETHEUS, running)
            running = None
    if running is None:
        refuse_taken_port(port, 'set another port with `make dashboards ARGS="9091"`')
        _start(program, head, port)
    print(f"prometheus:  http://{HOST}:{port} (scrapes Ray, evaluates {DEPLOYED.name}/prometheus/alerts.yml)")
    print(f"grafana:     add a Prometheus data source with the URL http://{HOST}:{port}, then under Dashboards, New,")
    print(f"             Import the files {', '.join(sorted(str(path) for path in (DEPLOYED / 'grafana').glob('*')))}")
    print("alerts:      prometheus-alertmanager --config.file deploy/prometheus/alertmanager.yml")
    print("             once your webhook's address is in it; docs/metrics.md has the list")


def _start(program: str, head: psutil.Process, port: int) -> None:
    folder = CONFIG.parent
    folder.mkdir(parents=True, exist_ok=True)
    config = (DEPLOYED / "prometheus/prometheus.yml").read_text().replace(DISCOVERY, discovery_file(head))
    CONFIG.write_text(config)
    shutil.copy(DEPLOYED / "prometheus/alerts.yml", folder)
    command = [program, f"--config.file={CONFIG}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={HOST}:{port}", "--storage.tsdb.retention.time=30d"]
    ready = Sign(Request(f"http://{HOST}:{port}/-/ready"))
    start(PROMETHEUS, command, ready, log=folder / "log", deadline_s=START_DEADLINE_S)


def listens_on(prometheus: psutil.Process) -> int:
    """The port of its command line; 0 if there is none."""
    found = [re.fullmatch(r"--web\.listen-address=.+:(\d+)", word) for word in prometheus.cmdline()]
    return next((int(port[1]) for port in found if port), 0)


def discovery_file(head: psutil.Process) -> str:
    """The list of nodes in this head's session folder; several Rays may run on one machine."""
    for process in head.children(recursive=True):
        for word in process.cmdline():
            if found := re.fullmatch(r"--session[-_]dir=(.+)", word):
                return f"{found[1]}/{Path(DISCOVERY).name}"
    return str(private_directory() / "ray" / Path(DISCOVERY).name)


def main() -> int:
    if len(sys.argv) > 2 or not all(word.isascii() and word.isdigit() for word in sys.argv[1:]):
        print("usage: python -m actors.cluster.dashboards [PORT]", file=sys.stderr)
        return 2
    return exit_status_of(lambda: up(*map(int, sys.argv[1:])))


if __name__ == "__main__":
    sys.exit(main())
