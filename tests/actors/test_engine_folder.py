"""What a killed engine leaves is cleared by the next; with a process in the place of vLLM's."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.generation.engine_folder import NOTES, SHARED_MEMORY, EngineFolder, clear

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


def test_a_file_of_shared_memory_that_has_another_number_by_now_stays(temporary: Path):
    folder = temporary / "vllm-left"
    folder.mkdir()
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as others:
        (folder / NOTES).write_text(f'{{"{Path(others.name).name}": 1}}')
        clear(folder)
        assert Path(others.name).exists()
    assert not list(folder.iterdir())


def test_a_process_has_its_own_temporary_folder_again_when_its_engine_has_ended(temporary: Path):
    folder = EngineFolder()
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == os.environ["VLLM_RPC_BASE_PATH"] == str(folder.path)
    folder.remove()
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(temporary)
    assert "VLLM_RPC_BASE_PATH" not in os.environ


def test_the_sockets_of_an_engine_fit_into_a_path_wherever_temporary_files_go(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = temporary / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = EngineFolder()
    try:
        assert folder.path.parent == Path("/tmp")
    finally:
        folder.remove()


def test_engines_of_one_process_lie_side_by_side_and_end_in_any_order(temporary: Path):
    first, second = EngineFolder(), EngineFolder()
    assert first.path.parent == second.path.parent == temporary
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(second.path)
    first.remove()
    assert second.path.is_dir() and tempfile.gettempdir() == str(second.path)
    second.remove()
    assert tempfile.gettempdir() == str(temporary) and not list(temporary.iterdir())


def test_an_engine_whose_folder_is_gone_ends_all_the_same(temporary: Path):
    folder = EngineFolder()
    shutil.rmtree(folder.path)
    folder.remove()
    assert tempfile.gettempdir() == str(temporary)
