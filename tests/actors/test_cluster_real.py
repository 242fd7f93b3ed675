"""The head of `make cluster-up`: nobody else can reach its files, and a new shell finds it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from actors.cluster import __main__ as cluster
from actors.cluster import dashboards
from actors.cluster.recorded_processes import recorded

pytestmark = pytest.mark.real


class Head:
    """A running head."""

    def __init__(self, printed: str) -> None:
        found = recorded(cluster.HEAD)
        assert found is not None
        self.process = found
        self.export_line = printed.partition("in your shell, once: ")[2].partition("\n")[0]
        self.session = Path(dashboards.discovery_file(found)).parent

    def in_a_new_shell(self, command: str) -> "subprocess.CompletedProcess[str]":
        """Without any variable of Ray but those that `make cluster-up` prints for the user to set, and the token."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        kept |= {
            "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"],
            "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
        }
        return subprocess.run(
            ["bash", "-c", f"{self.export_line}; {command}"], env=kept, capture_output=True, text=True, timeout=600
        )


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cluster"))
        patch.setattr(cluster, "DASHBOARD_PORT", cluster.free_port())
        patch.setattr(cluster, "START_DEADLINE_S", 240.0)
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        cluster.up()
        try:
            yield Head("\n".join(printed))
        finally:
            cluster.down()


def private(path: Path) -> bool:
    """Whether a directory above the path keeps every other user out."""
    return any(found.st_uid == os.geteuid() and not found.st_mode & 0o077 for found in map(os.stat, path.parents))


def test_no_other_user_can_enter_the_session(head: Head):
    assert head.session.name.startswith("session_") and private(head.session)
    if os.geteuid() == 0:
        stranger = subprocess.run(["/bin/ls", head.session], user=12345, capture_output=True, text=True)
        assert stranger.returncode != 0 and "Permission denied" in stranger.stderr


def test_no_other_user_can_enter_the_directory_of_a_socket_and_paths_fit(head: Head):
    ours = {process.pid for process in head.process.children(recursive=True)}
    listening = [
        Path(found.laddr)
        for found in psutil.net_connections("unix")
        if found.pid in ours and str(found.laddr).startswith("/")
    ]
    assert any(path.is_relative_to(head.session) for path in listening)
    assert not [path for path in listening if not private(path)]
    assert max(len(os.fsencode(path)) for path in listening) < 107


def test_prometheus_finds_the_list_of_nodes_by_the_session_and_by_the_path_in_its_file(head: Head):
    by_hand = dashboards.DISCOVERY.replace("/tmp/ray-UID", os.environ["RAY_TMPDIR"])
    for path in (dashboards.discovery_file(head.process), by_hand):
        assert re.search(r'"targets": \["[\d.]+:\d+"', Path(path).read_text()), path


def test_a_new_shell_finds_the_head_and_submits_as_documented(head: Head):
    status = head.in_a_new_shell("until ray status | tee status | grep -q Active:; do sleep 1; done; cat status")
    assert status.returncode == 0 and "Active:" in status.stdout, status.stderr[-1_000:]
    submitted = head.in_a_new_shell(
        f"ray job submit --address http://127.0.0.1:{cluster.DASHBOARD_PORT} --working-dir . -- "
        "python -c 'import ray; ray.init(); print(sum(ray.cluster_resources().values()) > 0)'"
    )
    assert submitted.returncode == 0 and "True" in submitted.stdout, submitted.stdout[-1_000:]
