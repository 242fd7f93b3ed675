"""What an engine starts ends with it, whoever killed it; here with programs in the place of vLLM's processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from actors.generation import owner

CORE = """
import subprocess, sys, time
from actors.generation.owner import end_with_owner
if "worker" in sys.argv:
    started = subprocess.Popen([sys.executable, "-c", WORKER])
else:
    end_with_owner()
print("up", flush=True)
time.sleep(600)
"""
WORKER = """
import time
from actors.generation.owner import end_with_owner
end_with_owner()
time.sleep(600)
"""
OWNER = """
import os, subprocess, sys, time
from actors.generation.owner import owned_by_this
environment = {**os.environ, **owned_by_this()}
core = subprocess.Popen([sys.executable, "-c", CORE, *sys.argv[1:]], env=environment, stdout=subprocess.PIPE)
core.stdout.readline()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("arguments", [[], ["worker"]], ids=["alone", "through a separate worker"])
def test_the_killed_owners_processes_end(arguments: list[str]):
    core = CORE.replace("WORKER", repr(WORKER))
    program = OWNER.replace("CORE", repr(core))
    started = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE)
    assert started.stdout
    with started, started.stdout:
        started.stdout.readline()
        time.sleep(0.5 if arguments else 0)  # a worker may come up after its parent has said so
        children = psutil.Process(started.pid).children(recursive=True)
        assert len(children) == 1 + len(arguments)
        started.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_whoever_has_no_owner_or_is_it_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(owner.OWNER, raising=False)
    owner.end_with_owner()
    for name, value in owner.owned_by_this().items():
        monkeypatch.setenv(name, value)
    owner.end_with_owner()


def test_an_owner_whose_id_another_has_by_now_is_gone():
    program = "import time; from actors.generation.owner import end_with_owner; end_with_owner(); time.sleep(600)"
    environment = {**os.environ, owner.OWNER: f"{os.getpid()} of another boot 7"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=20, cwd=Path.cwd())
    assert done.returncode == -signal.SIGTERM
