"""The working folder between two programs."""

# Plain strings: thousands of entries, in a process that is copied for every call.
# ruff: noqa: PTH101, PTH104, PTH106, PTH108, PTH112, PTH114, PTH208
import contextlib
import itertools
import os
import time
from collections.abc import Iterator

MAX_FILES = 4000
MAX_BYTES = 64 << 20
MAX_DEPTH = 64  # folders within folders; each is open while we look below it
LOOK_S = 0.1  # a look keeps the program's deadline waiting
CLEAN_S = 0.05  # emptying a folder keeps its program's result waiting
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _TooMuch(Exception):
    """More entries or bytes than a program may leave."""


class _Look:
    """One walk through a folder that may change meanwhile; a look that takes too long decides nothing."""

    def __init__(self) -> None:
        self._end = time.monotonic() + LOOK_S
        self._count = self._blocks = 0

    def into(self, folder: int) -> list[str]:
        """Count what is in an open folder; returns the folders in it."""
        below: list[str] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._count += 1
                with contextlib.suppress(FileNotFoundError):
                    self._blocks += entry.stat(follow_symlinks=False).st_blocks
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
                if self._count > MAX_FILES or self._blocks * 512 > MAX_BYTES:
                    raise _TooMuch
                if time.monotonic() > self._end:
                    raise TimeoutError
        return below


def too_much_in(home: str) -> bool:
    """True where a program without a file system of its own leaves more than it may.

    Folders too deep to look into, or closed to us, count as too much.
    """
    look = _Look()
    branch: list[int] = []  # the open folders from `home` down ...
    below: list[list[str]] = [[home]]  # ... and what is still to be looked into, below each
    try:
        while below:
            if not below[-1]:
                below.pop()
                if branch:
                    os.close(branch.pop())
                continue
            if len(branch) > MAX_DEPTH:
                return True
            name = below[-1].pop()
            try:
                branch.append(os.open(name, _FOLDER, dir_fd=branch[-1] if branch else None))
            except (FileNotFoundError, NotADirectoryError):
                continue  # it went just now
            below.append(look.into(branch[-1]))
    except (_TooMuch, PermissionError):
        return True
    except OSError:
        return False  # it changes under us; the next look decides
    finally:
        for folder in branch:
            os.close(folder)
    return False


def leave_empty(home: str, *, seconds: float = CLEAN_S) -> bool:
    """Empty the working folder; False where that takes longer than `seconds`, or is not possible.

    Never recursive, never follows a link: folders are moved up and emptied one level at a time.
    """
    end = time.monotonic() + seconds
    mark = time.monotonic_ns()  # what no program that is dead by now has guessed
    places = (f"{home}/.up-{mark}-{number}" for number in itertools.count())
    try:
        os.chmod(home, 0o700)
        names = os.listdir(home)
        while names:
            for name in names:
                path = f"{home}/{name}"
                try:
                    os.unlink(path)
                except IsADirectoryError:
                    _move_up(path, places, end)
                    os.rmdir(path)
                if time.monotonic() > end:
                    return False
            names = os.listdir(home)
    except OSError:
        return False
    return True


def _move_up(path: str, places: Iterator[str], end: float) -> None:
    """Unlink the files of a folder and move its folders to `places`. Raises TimeoutError after `end`."""
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        inside = f"{path}/{name}"
        if os.path.isdir(inside) and not os.path.islink(inside):
            os.chmod(inside, 0o700)
            os.rename(inside, next(places))
        else:
            os.unlink(inside)
        if time.monotonic() > end:
            raise TimeoutError


def clear_away(home: str) -> None:
    """Remove a folder that a program may have left in any state."""
    leave_empty(home, seconds=60.0)
    with contextlib.suppress(OSError):
        os.rmdir(home)
