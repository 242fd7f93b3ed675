"""Folders for temporary files that do not stay for ever: what an owner that was killed has left, the next one clears.

An owner holds a lock on a file in its folder; the kernel lets it go with the process. Whoever makes a folder of the
same kind removes those beside it whose lock nobody holds.
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


class LockedFolder:
    """A new folder, its owner's alone, until `remove`."""

    def __init__(
        self, prefix: str, *, parent: str | None = None, clear: Callable[[Path], object] = shutil.rmtree
    ) -> None:
        """`prefix` names the kind; `clear` removes a folder with all that is in it, and may fail."""
        self._clear = clear
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        sweep(self.path.parent, prefix, clear)
        locking = self.path / f"{LOCK}-new"
        self._lock = os.open(locking, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        locking.rename(self.path / LOCK)  # from here on it is told from a folder that is only just being made

    def remove(self) -> None:
        """With all that is in it."""
        try:
            self._clear(self.path)
        finally:
            os.close(self._lock)


def sweep(parent: Path, prefix: str, clear: Callable[[Path], object] = shutil.rmtree) -> None:
    """Remove this user's folders of this kind whose owner is no more."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode):
                continue  # of a stranger, who may have made it for us to find
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear(folder)
            finally:
                os.close(lock)
