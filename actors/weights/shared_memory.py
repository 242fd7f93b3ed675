"""Weights on their way into an engine's worker processes: laid out in shared memory, so that the swap is one copy.

The engine's process lays them out while the engine continues decoding; only then is it paused, and its workers (other
processes of the same host) copy from the mapping. Nothing large ever crosses a socket. Engines of one node that take
one version together share one file, so that eight of them do not hold the weights eight times.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.weights.buckets import WeightBucket, WeightEntry, size_of
from rstar_ray.errors import DeadlineExceeded

log = logging.getLogger(__name__)

BY_FILE = "file"  # how the weights of a parcel come
SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = Path(tempfile.gettempdir())
"""The node's, by which its engines meet: found before one of them takes a separate folder."""
PREFIX = "rstar-weights-"
WHOLE = b"\x01"  # after the last bucket of a file that is laid out
LAID_OUT_DEADLINE_S = 100.0
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A file in shared memory with all buckets of one version."""

    path: str
    laid_out: bool  # by this process, and not by another of its node


def open_buckets(path: str, plan: Sequence[tuple[WeightEntry, ...]]) -> list[WeightBucket]:
    """The buckets as copy-on-write views of the mapping: no byte is copied, none can be changed for others."""
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    sizes = [size_of(entries) for entries in plan]
    places = zip(plan, _offsets(sizes)[0], sizes, strict=True)
    return [WeightBucket(entries, mapped[offset : offset + size]) for entries, offset, size in places]


@contextmanager
def shared_buckets(
    name: str,
    buckets: Sequence[WeightBucket],
    *,
    folder: Path | None = None,
    deadline_s: float = LAID_OUT_DEADLINE_S,
) -> Generator[SharedWeights]:
    """The buckets in one file in shared memory, which all of this node that are here under one `name` meanwhile share.

    The first lays it out, those who come meanwhile wait for that, and the last to leave removes it. Whoever dies leaves
    by that: what nobody holds any more the next one removes. Raises `DeadlineExceeded` where laying out takes too long.
    """
    offsets, total = _offsets([bucket.num_bytes for bucket in buckets])
    file = f"{PREFIX}{os.geteuid()}-{name}"
    path = (folder or _folder(file, total)) / file
    _remove_left(path)
    descriptor, laid_out = _held(path, _layer(buckets, offsets, total), total, deadline_s)
    try:
        yield SharedWeights(str(path), laid_out)
    finally:
        _leave(descriptor, path)


def _held(path: Path, lay_out: Callable[[int], None], total: int, deadline_s: float) -> tuple[int, bool]:
    """A descriptor of the whole file that holds it there by a shared lock, and whether it was laid out by this call.

    A lock for oneself is that of whoever lays out. The kernel releases the locks of processes that ended.
    """
    until, laid_out = time.monotonic() + deadline_s, False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with contextlib.ExitStack() as unless_held:
            unless_held.callback(os.close, descriptor)
            if _owner(descriptor) != os.geteuid():
                raise PermissionError(f"{path} belongs to another user, who may have put it there; remove it")
            if _locked(descriptor, fcntl.LOCK_EX) and _is_there(descriptor) and not _is_whole(descriptor, total):
                lay_out(descriptor)
                laid_out = True
            if _locked(descriptor, fcntl.LOCK_SH) and _is_there(descriptor) and _is_whole(descriptor, total):
                unless_held.pop_all()
                return descriptor, laid_out
        if time.monotonic() > until:
            raise DeadlineExceeded("engine", "another engine of this node", f"laying out {path}", deadline_s)
        time.sleep(POLL_S)


def _leave(descriptor: int, path: Path) -> None:
    """Of two who leave at one time, one is the last: the kernel gives the lock for oneself to no more than one."""
    if _locked(descriptor, fcntl.LOCK_EX) and _is_there(descriptor):
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _remove_left(path: Path) -> None:
    """Files that nobody holds: their holders were killed."""
    for other in path.parent.glob(f"{PREFIX}{os.geteuid()}-*"):
        if other != path:
            with contextlib.suppress(OSError):
                descriptor = os.open(other, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                _leave(descriptor, other)


def _layer(buckets: Sequence[WeightBucket], offsets: Sequence[int], total: int) -> Callable[[int], None]:
    def lay_out(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, total)
        for bucket, offset in zip(buckets, offsets, strict=True):
            _write(descriptor, bucket.data.data, offset)
        _write(descriptor, memoryview(WHOLE), total)

    return lay_out


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    """All of it: the kernel takes 2 GiB at once."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _owner(descriptor: int) -> int:
    return os.fstat(descriptor).st_uid


def _is_whole(descriptor: int, total: int) -> bool:
    """Its last byte is written last."""
    return os.pread(descriptor, len(WHOLE) + 1, total) == WHOLE


def _is_there(descriptor: int) -> bool:
    """Not removed meanwhile."""
    return os.fstat(descriptor).st_nlink > 0


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _offsets(sizes: Sequence[int], page: int = 4096) -> tuple[list[int], int]:
    """Where each bucket starts, and the end: on a page, so that every dtype may be viewed in place."""
    offsets, end = list[int](), 0
    for num_bytes in sizes:
        offsets.append(end)
        end += -(-num_bytes // page) * page
    return offsets, end


def _folder(file: str, num_bytes: int) -> Path:
    """Shared memory where it has room (containers often give 64 MiB), else the temporary folder."""
    if (SHARED_MEMORY / file).exists():
        return SHARED_MEMORY
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free > num_bytes:
        return SHARED_MEMORY
    log.warning(
        f"weights of {num_bytes / 1e9:.1f} GB go through {TEMPORARY}, which is slow: shared memory has "
        f"{free / 1e9:.1f} GB free (Docker: --ipc host, or --shm-size)"
    )
    return TEMPORARY
