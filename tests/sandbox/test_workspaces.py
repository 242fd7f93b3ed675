"""The folder of a pool's working folders: gone with the pool, or with the next pool's beginning."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.cgroups import Groups, KernelTree
from sandbox.isolation import IsolationLevel, choose_first_uid
from sandbox.workspaces import Workspaces

KILLED = """
import os, signal
from sandbox.workspaces import Workspaces
from sandbox.isolation import IsolationLevel
workspaces = Workspaces()
_, home, _ = workspaces.take(IsolationLevel.PROCESS)
open(os.path.join(home, "file"), "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""
CLOSED = """
import asyncio, os
from sandbox.workspaces import Workspaces
workspaces = Workspaces()
print(len(os.listdir(os.environ["TMPDIR"])))
asyncio.run(workspaces.close())
"""


def test_a_pool_that_was_killed_leaves_a_folder_until_the_next_begins_and_one_that_closes_none(tmp_path: Path):
    def run(code: str) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)

    assert run(KILLED).returncode == -signal.SIGKILL
    assert [path.name.startswith("sandbox-") for path in tmp_path.iterdir()] == [True]
    closed = run(CLOSED)
    assert (closed.returncode, closed.stdout.strip()) == (0, "1"), closed.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives programs separate uids")
async def test_programs_of_two_pools_have_different_uids():
    pools = [Workspaces(Groups(KernelTree(), "", "none", "")) for _ in range(2)]
    first, second = (Path(each.take(IsolationLevel.LANDLOCK)[1]).stat().st_uid for each in pools)
    assert first != second
    for each in pools:
        await each.close()


@pytest.mark.parametrize(
    ("uid_map", "low", "high"),
    [
        ("0 0 4294967295", 1_879_048_192, 1_880_048_192),
        ("0 100000 65536", 32_768, 49_152),
        ("0 1000 1\n1 100000 65536", 32_769, 49_153),
    ],
)
def test_uids_of_a_pool_are_mapped(uid_map: str, low: int, high: int):
    chosen = {choose_first_uid(uid_map) for _ in range(100)}
    assert low <= min(chosen) and max(chosen) < high


def test_too_few_mapped_uids_give_none_that_is_mapped():
    assert choose_first_uid("0 1000 1") >= 65_536
