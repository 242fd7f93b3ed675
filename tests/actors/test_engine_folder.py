"""What a killed engine leaves is cleared by the next; with a process in the place of vLLM's."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.generation.engine_folder import SHARED_MEMORY, EngineFolder

ENGINE = """
import os, tempfile, time
from multiprocessing import get_context, resource_tracker
from multiprocessing.shared_memory import SharedMemory
from actors.generation.engine_folder import EngineFolder
folder = EngineFolder()
tempfile.mkdtemp(prefix="pymp-")
shared = SharedMemory(create=True, size=64)
resource_tracker.unregister(shared._name, "shared_memory")  # which a killed engine's takes along, or is killed with it
kept = get_context("spawn").Semaphore(1)
semaphore = kept._semlock
resource_tracker.unregister(semaphore.name, "semaphore")
folder.note_shared([os.getpid()])
print(folder.path.name, shared.name, "sem." + semaphore.name[1:], flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
        yield Path(path)


def test_what_a_killed_engine_left_goes_with_the_next_in_shared_memory_too(temporary: Path):
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            name, *shared = engine.stdout.readline().split()
            living = EngineFolder()
            assert (temporary / name).is_dir() and all((SHARED_MEMORY / file).exists() for file in shared)
            living.remove()
        finally:
            engine.kill()
    assert any((temporary / name).glob("pymp-*"))
    following = EngineFolder()
    assert list(temporary.iterdir()) == [following.path]
    assert len(shared) == 2 and not any((SHARED_MEMORY / file).exists() for file in shared)
    following.remove()
    assert list(temporary.iterdir()) == []
