"""Keeps the temporary files and the shared memory files of vLLM's processes together, so that they can be removed.

Sockets, rendezvous files and locks are in a separate folder per engine, which also lists the engine's files in shared
memory. A closed engine removes them; those of a killed engine are removed by the machine's next engine
(`rstar_ray.temporary_folder`).
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from rstar_ray.temporary_folder import LockedFolder, empty

PREFIX = "vllm-"
SOCKETS = "VLLM_RPC_BASE_PATH"
VARIABLES = ("TMPDIR", SOCKETS)
SHARED_MEMORY = Path("/dev/shm")
NOTES = "shared-memory.json"
LONGEST_PARENT = 52
"""Longest path of the parent folder, in characters: a socket's path may have 107, including our folder, one of Python's
and a name of 36 characters.
"""


class EngineFolder:
    """The folder of one engine; create it before the start, and remove it after the end. Meanwhile it is also this
    process's folder for temporary files.
    """

    _live: ClassVar[list["EngineFolder"]] = []  # of this process; benchmarks run several engines in one process

    def __init__(self) -> None:
        first = self._live[0] if self._live else None
        self._before = first._before if first else {name: os.environ.get(name) for name in VARIABLES}
        self._tempdir_before = first._tempdir_before if first else tempfile.tempdir
        self._parent: str = first._parent if first else os.environ.get(SOCKETS) or tempfile.gettempdir()
        parent = self._parent if len(self._parent) <= LONGEST_PARENT else "/tmp"
        self._own = LockedFolder(PREFIX, parent=parent, clear=clear)
        self.path = self._own.path
        self._live.append(self)
        _lead(dict.fromkeys(VARIABLES, str(self.path)), str(self.path))

    def note_shared(self, pids: Iterable[int]) -> None:
        """Record the shared memory files of these processes: name and inode of each."""
        notes = self.path / NOTES
        held = _read(notes) | {name: number for pid in pids for name, number in _mapped(pid).items()}
        with contextlib.suppress(OSError):
            notes.write_text(json.dumps(held))

    def remove(self) -> None:
        """Remove the folder; call it after vLLM's processes have ended."""
        self._live.remove(self)
        if tempfile.tempdir == str(self.path):
            last = str(self._live[-1].path) if self._live else None
            _lead(dict.fromkeys(VARIABLES, last) if last else self._before, last or self._tempdir_before)
        with contextlib.suppress(FileNotFoundError):  # the temporary files were removed by someone else
            self._own.remove()


def _lead(variables: Mapping[str, str | None], tempdir: str | None) -> None:
    """Set the temporary folder of this process and of its children."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = tempdir


def clear(folder: Path) -> None:
    """Remove the folder's content, and the engine's files in shared memory unless their names were reused."""
    for name, number in _read(folder / NOTES).items():
        with contextlib.suppress(OSError):
            about = (SHARED_MEMORY / name).lstat()
            if about.st_ino == number and about.st_uid == os.geteuid():
                (SHARED_MEMORY / name).unlink()
    with contextlib.suppress(OSError):  # the next engine clears the rest
        empty(folder)


def _read(notes: Path) -> dict[str, int]:
    try:
        return json.loads(notes.read_text())
    except (OSError, ValueError):  # no file yet, or incomplete after a kill
        return {}


def _mapped(pid: int) -> dict[str, int]:
    """Inodes of a process's files in shared memory, by name, from `/proc/<pid>/maps` (proc(5)).

    Files are found by inode, because glibc creates a semaphore under a temporary name, which is the one in `maps`. A
    file without a name needs no removal.
    """
    numbers: set[int] = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                numbers.add(int(fields[4]))
        if numbers:
            return {entry.name: entry.inode() for entry in os.scandir(SHARED_MEMORY) if entry.inode() in numbers}
    return {}
