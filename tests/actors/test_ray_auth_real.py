"""A Ray started as the runs start it, and a stranger without its token: GCS, jobs and dashboard refuse."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from actors.cluster import __main__ as head
from actors.cluster import auth

pytestmark = pytest.mark.real

AT_THE_GCS = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)), "nodes")
"""
AT_THE_JOBS = """
import sys
from ray.job_submission import JobSubmissionClient
print("submitted", JobSubmissionClient(f"http://{sys.argv[1]}").submit_job(entrypoint="true"))
"""
AS_A_RECIPE = """
import os, sys
os.environ["RAY_ADDRESS"] = sys.argv[1]
from actors.launch.ray_connection import connect
from actors.launch.exit_status import status_of
sys.exit(status_of(connect))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator["ray.runtime_context.RayContext"]:  # type: ignore[name-defined]
    """A head as `make cluster-up` starts it, with separate ports: other tests have a Ray at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cluster"))
        patch.setattr(head, "DASHBOARD_PORT", head.free_port())
        head.up()
        try:
            yield ray.init(address="auto", log_to_driver=False)
            ray.shutdown()
        finally:
            head.down()


def ask(program: str, address: str, home: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a stranger's program: no variable of Ray, and no token in its home."""
    home.mkdir(exist_ok=True)
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", program, address],
        env={**without, "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


@pytest.mark.parametrize(("place", "program"), [("gcs_address", AT_THE_GCS), ("webui_url", AT_THE_JOBS)])
def test_a_stranger_is_refused_and_who_has_the_token_is_not(place: str, program: str, cluster, tmp_path: Path):  # type: ignore[no-untyped-def]
    address = cluster.address_info[place]
    for environment in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        stranger = ask(program, address, tmp_path / "home", **environment)
        assert stranger.returncode != 0 and not stranger.stdout, stranger.stdout
        assert "uthenticat" in stranger.stderr, stranger.stderr[-1_000:]
    for _ in range(60):  # Ray's job agent starts after its head, and a job is refused until then
        friend = ask(program, address, tmp_path / "home", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=auth.the_token())
        if "No available agent" not in friend.stderr:
            break
        time.sleep(1)
    assert friend.returncode == 0, friend.stderr[-1_000:]


def test_a_recipe_with_another_token_is_refused_in_one_line(cluster, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Side by side: Ray takes 20 s to give up each."""
    address = cluster.address_info["gcs_address"]
    fields: dict[str, dict[str, str]] = {
        "RAY_AUTH_TOKEN": {"RAY_AUTH_TOKEN": "0" * 64},
        "token": {},  # one that is made in its home
        "RAY_AUTH_MODE": {"RAY_AUTH_MODE": "disabled"},
    }
    with ThreadPoolExecutor() as together:
        asked = {
            field: together.submit(ask, AS_A_RECIPE, address, tmp_path / field, **environment)
            for field, environment in fields.items()
        }
    for field, answer in asked.items():
        refused = answer.result()
        line = refused.stderr.strip().splitlines()[-1]
        assert refused.returncode == 2 and line.startswith(f"error: {field}: "), refused.stderr[-1_000:]
        assert f"the cluster at {address}" in line and "Traceback" not in refused.stderr


@pytest.mark.parametrize("path", ["/api/version", "/api/jobs/", "/nodes?view=summary", "/api/v0/actors"])
def test_the_dashboard_tells_a_stranger_nothing(path: str, cluster):  # type: ignore[no-untyped-def]
    url = f"http://{cluster.address_info['webui_url']}{path}"
    assert status(url) == 401
    assert status(url, Authorization="Bearer wrong") in (401, 403)
    assert status(url, Authorization=f"Bearer {auth.the_token()}") == 200
