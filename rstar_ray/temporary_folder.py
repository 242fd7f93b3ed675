"""Temporary folders that are removed even if their owner is killed: the next owner removes them.

An owner holds a lock on a file in its folder, which the kernel releases when the process ends. The creator of a folder
removes other folders of the same kind whose lock is free.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

LOCK = ".owner"


def insides(folder: Path) -> list[Path]:
    """The folder's content except the lock."""
    return [inside for inside in folder.iterdir() if inside.name != LOCK]


def empty(folder: Path) -> None:
    """Remove the folder's content except the lock."""
    for inside in insides(folder):
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside)
        else:
            inside.unlink()


class LockedFolder:
    """A new folder, private to its owner, until `remove`."""

    def __init__(self, prefix: str, *, parent: str | None = None, clear: Callable[[Path], object] = empty) -> None:
        """`prefix`: kind of folder. `clear`: removes the `insides` of a folder, and may fail."""
        self._clear = clear
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        sweep(self.path.parent, prefix, clear)
        locking = self.path / f"{LOCK}-new"
        self._lock = os.open(locking, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        locking.rename(self.path / LOCK)  # from now on `sweep` can tell it from a folder that is being created

    def remove(self) -> None:
        """Remove the folder with its content."""
        try:
            _remove(self.path, self._clear)
        finally:
            os.close(self._lock)


def _remove(folder: Path, clear: Callable[[Path], object]) -> None:
    """Remove the lock last, so that an interrupted removal differs from a folder that is being created."""
    clear(folder)
    if not insides(folder):
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


def sweep(parent: Path, prefix: str, clear: Callable[[Path], object] = empty) -> None:
    """Remove this user's folders of this kind whose owner has ended."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode):
                continue  # of another user, possibly created as an attack
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder, clear)
            finally:
                os.close(lock)
