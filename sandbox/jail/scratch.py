"""The working folder: whether a program has changed it, whether it is too large, and its removal."""

# Plain strings: there are thousands of entries, in a process that is forked for every call.
# ruff: noqa: PTH101, PTH116, PTH119, PTH120, PTH208
import contextlib
import itertools
import os
import time
from collections.abc import Iterator

MAX_FILES = 4000
MAX_BYTES = 64 << 20
MAX_DEPTH = 64  # nested folders; each is open while its entries are scanned
SCAN_S = 0.1  # longest scan: it delays the check of the program's deadline
CLEAR_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_COARSE_CLOCK = 5  # CLOCK_REALTIME_COARSE, the clock of file times


def stamp(home: str) -> tuple[int, ...]:
    """Attributes of a folder that differ after any change in it, even after one that was undone."""
    about = os.stat(home)
    return about.st_mtime_ns, about.st_ctime_ns, about.st_mode, about.st_nlink, about.st_size


def first_stamp(home: str) -> tuple[int, ...]:
    """The stamp of a new folder, taken when the clock of file times has advanced: a later change has a later time."""
    made = os.stat(home).st_ctime_ns
    end = time.monotonic() + SCAN_S
    while time.clock_gettime_ns(_COARSE_CLOCK) <= made and time.monotonic() < end:
        time.sleep(0.001)
    os.listdir(home)  # so that a later read, by the worker or a program, sets no newer time (relatime)
    return stamp(home)


class _TooMuch(Exception):
    """More entries or bytes than a program may leave."""


class _Scan:
    """One scan of a folder that may change meanwhile; a scan that takes too long has no result."""

    def __init__(self) -> None:
        self._end = time.monotonic() + SCAN_S
        self._count = self._blocks = 0

    def into(self, folder: int) -> list[str]:
        """Count the entries of an open folder; returns the folders in it."""
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
    """True if a program without a separate file system has written more than it may.

    Folders that are too deep, or not readable, count as too much.
    """
    scan = _Scan()
    branch: list[int] = []  # the open folders from `home` down ...
    below: list[list[str]] = [[home]]  # ... and the folders that remain to be scanned, below each
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
                continue  # removed meanwhile
            below.append(scan.into(branch[-1]))
    except (_TooMuch, PermissionError):
        return True
    except OSError:
        return False  # it changes meanwhile; the next scan decides
    finally:
        for folder in branch:
            os.close(folder)
    return False


def clear_away(home: str, *, seconds: float = CLEAR_S) -> bool:
    """Remove a folder, in any state that a program has left; False if that fails or takes longer than `seconds`.

    Uses descriptors only, so that no link is followed even if a process still changes the folder. Not recursive:
    nested folders are moved up and emptied one level at a time.
    """
    end = time.monotonic() + seconds
    try:
        parent = os.open(os.path.dirname(home), _FOLDER)
    except OSError:
        return False
    try:
        with contextlib.suppress(FileNotFoundError):
            _empty(parent, os.path.basename(home), end)
            os.rmdir(os.path.basename(home), dir_fd=parent)
    except OSError:
        return False
    finally:
        os.close(parent)
    return True


def _empty(parent: int, name: str, end: float) -> None:
    """Empty the folder `name` of an open folder. Raises OSError, and TimeoutError after `end`."""
    mark = time.monotonic_ns()  # programs cannot guess the names
    places = (f".up-{mark}-{number}" for number in itertools.count())
    home = _open_for_us(parent, name)
    try:
        while names := os.listdir(home):
            for inside in names:
                _check(end)
                if not _unlinked(home, inside):
                    _move_up(home, inside, places, end)
                    os.rmdir(inside, dir_fd=home)
    finally:
        os.close(home)


def _move_up(home: int, name: str, places: Iterator[str], end: float) -> None:
    """Unlink the files of a folder and move its folders to `places` in `home`."""
    folder = _open_for_us(home, name)
    try:
        for inside in os.listdir(folder):
            _check(end)
            if not _unlinked(folder, inside):
                os.close(_open_for_us(folder, inside))  # a folder that its owner cannot write to cannot be moved
                os.rename(inside, next(places), src_dir_fd=folder, dst_dir_fd=home)
    finally:
        os.close(folder)


def _unlinked(folder: int, name: str) -> bool:
    """Remove an entry that is not a folder; False if it is one."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


def _open_for_us(parent: int, name: str) -> int:
    """Open a folder even if its mode excludes its owner; never a link."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
        return os.open(".", _FOLDER, dir_fd=found)
    finally:
        os.close(found)


def _check(end: float) -> None:
    if time.monotonic() > end:
        raise TimeoutError
