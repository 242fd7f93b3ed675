"""File locks that keep a second process from writing the same files; a lock ends with the process that holds it."""

import fcntl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import unwritable


def lock(file: IO[str], what: Path, in_use: Callable[[], str]) -> None:
    """Lock the open file until it is closed. Raises `ConfigError` with the text of `in_use` where another process holds
    the lock, and where the file system of `what` has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError("--run-dir", in_use(), "wait for it to end or name another directory") from None
    except OSError as refused:  # Lustre without its option, and some of FUSE
        hint = "mount its file system with locks (Lustre: -o flock), or name a directory on another"
        problem = f"{what} cannot be locked against a second run ({refused.strerror})"
        raise ConfigError("--run-dir", problem, hint) from refused


@contextmanager
def written_alone(path: Path) -> Generator[None, None, None]:
    """Lock an evaluation's file against a second writer.

    Raises `ConfigError` where another process holds the lock, and where the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as refused:
        raise unwritable(path, refused) from refused
    with file:
        lock(file, path, lambda: f"{path} is being written by another evaluation with the same requests")
        yield
