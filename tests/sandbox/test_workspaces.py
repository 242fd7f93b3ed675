"""The folder of a pool's working folders: gone with the pool, or with the next pool's beginning."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
