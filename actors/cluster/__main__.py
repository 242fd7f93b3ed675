"""A Ray head on this machine: `python -m actors.cluster up` starts it, `down` stops the head that `up` started.

It accepts only clients that have its token (`actors.cluster.auth`). Only the dashboard is bound to the loopback; Ray's
other servers listen on every interface.
"""

import os
import shutil
import socket
import sys
from pathlib import Path
from urllib.request import Request

from actors.cluster.auth import MODE_VARIABLE, export_line, private_directory, require_token_auth, the_token
from actors.cluster.gpu_environment import accelerator, gpu_environment
from actors.cluster.hosts_file import run_cluster_file
from actors.cluster.recorded_processes import Sign, end, recorded, start
from actors.launch.ray_connection import SLOW_START
from rstar_ray.config.run import CheckpointConfig
from rstar_ray.errors import ConfigError
from rstar_ray.exit_status import exit_status_of

HOST, DASHBOARD_PORT = "127.0.0.1", 8265
STATE = Path(".cluster")
HEAD, PROMETHEUS = STATE / "head.json", STATE / "prometheus.json"
"""Records of the processes that this project starts; see `actors.cluster.dashboards` for the second."""
START_DEADLINE_S = 180.0  # long enough for a busy machine
START_ATTEMPTS = 3
STARTED = "Ray runtime started."
"""Output of `ray start` when the node has joined; the dashboard answers earlier, even if no node ever joins."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Time until `ray job stop` kills a job that it asked to end [s]; Ray reads it from the head's or the job's
environment, and defaults to 3.
"""
CLOSING_S = 60  # to close a run's actors, after its grace time


def cluster_environment(runs: Path) -> dict[str, str]:
    """The environment of the head, which every job's driver inherits."""
    return {
        STOP_WAIT: f"{CheckpointConfig().grace_s + CLOSING_S:.0f}",
        **gpu_environment(accelerator()),
        **os.environ,  # the user's settings override the file's
        MODE_VARIABLE: os.environ.get(MODE_VARIABLE, "token"),
        "RAY_DASHBOARD_ENABLE_PROFILING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RSTAR_RAY_RUNS": str(runs),  # a job's own folder is deleted with its session
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def up() -> None:
    """Start the head and wait until its dashboard answers. Raises `ConfigError` if the port is in use."""
    if recorded(HEAD) is not None:
        raise ConfigError("cluster", "it is up already", "run `make cluster-down` first")
    refuse_taken_port(DASHBOARD_PORT)
    private_directory()
    locked = require_token_auth()
    STATE.mkdir(exist_ok=True)
    ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or "ray"
    command = [ray, "start", "--head", "--block", "--disable-usage-stats", f"--node-ip-address={HOST}"]
    command += [f"--dashboard-host={HOST}", f"--dashboard-port={DASHBOARD_PORT}", "--port=0"]
    command += [f"--dashboard-agent-listen-port={free_port()}"]  # the default port is in use if a second Ray runs here
    dashboard, log = f"http://{HOST}:{DASHBOARD_PORT}", STATE / "head.log"
    answers = Request(f"{dashboard}/api/version", headers={"Authorization": f"Bearer {the_token()}"} if locked else {})
    environment = cluster_environment(Path.cwd() / "runs")
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            start(
                HEAD,
                command,
                Sign(answers, says=STARTED),
                log=log,
                deadline_s=START_DEADLINE_S,
                environment=environment,
            )
            break
        except ConfigError:
            if attempt == START_ATTEMPTS or SLOW_START not in log.read_text(errors="replace"):
                raise
            print("Ray's node did not start in 30 s (a busy machine?); trying again")
    print(f"cluster up: dashboard {dashboard}")
    print(f"in your shell, once: {export_line()}")
    job = "python recipes/stage1.py --run-dir runs/job"
    print(f"submit:     ray job submit --address {dashboard} --working-dir . -- {job}")


def down() -> None:
    """Stop the head that `up` started, with its children and its Prometheus, by their recorded ids."""
    head, prometheus = recorded(HEAD), recorded(PROMETHEUS)
    if prometheus is not None:
        end(PROMETHEUS, prometheus)
    if head is None:
        print("no cluster of this folder is up")
        return
    end(HEAD, head)
    print("cluster down")


def refuse_taken_port(port: int, hint: str = "the dashboard and `ray job submit` need it") -> None:
    """Raise `ConfigError` for an invalid port number or a port in use."""
    if not 0 < port < 65536:
        raise ConfigError(f"port {port}", "it is not a port", "give 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as taken:
            raise ConfigError(f"port {port}", "it is in use", f"stop what listens there; {hint}") from taken


def free_port() -> int:
    """A port that nothing listens on at this moment, on any address."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    actions = {"up": up, "down": down}
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in actions:
        print("usage: python -m actors.cluster up|down [FILE for `ray up`]", file=sys.stderr)
        return 2
    if len(sys.argv) == 3:
        action, file = "up" if sys.argv[1] == "up" else "down", Path(sys.argv[2])
        return exit_status_of(lambda: run_cluster_file(action, file))
    return exit_status_of(actions[sys.argv[1]])


if __name__ == "__main__":
    sys.exit(main())
