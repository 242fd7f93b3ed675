"""Weights in shared memory for an engine's worker processes, so that a swap of weights is one copy.

The engine's process writes them while the engine continues decoding. The engine is then paused, and its workers, which
are processes of the same host, copy from the mapping, so no weights pass through a socket. Engines of one node that
take the same version share one file, so that the node holds it once.
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

BY_FILE = "file"  # a parcel's way of transfer
SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = Path(tempfile.gettempdir())
"""Shared by the node's engines; read at import, before an engine sets a separate temporary folder."""
PREFIX = "rstar-weights-"
COMPLETE = b"\x01"  # follows the last bucket of a complete file
PAGE_BYTES = 4096
LAID_OUT_DEADLINE_S = 100.0
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A file in shared memory with all buckets of one version."""

    path: str
    laid_out: bool  # True: by this process; False: by another process of the node


def open_buckets(path: str, plan: Sequence[tuple[WeightEntry, ...]]) -> list[WeightBucket]:
    """The buckets as copy-on-write views of the mapping: without copying, and changes stay private."""
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
    """The buckets in one file in shared memory, shared by all processes of this node that use the same `name`.

    The first process writes it, later ones wait for it, and the last to leave removes it. The next call removes files
    whose processes have died. Raises `DeadlineExceeded` if writing takes too long.
    """
    offsets, total = _offsets([bucket.num_bytes for bucket in buckets])
    file = f"{PREFIX}{os.geteuid()}-{name}"
    for place in (folder,) if folder else (SHARED_MEMORY, TEMPORARY):  # before the free space is measured
        _remove_left(place / file)
    path = (folder or _folder(file, total)) / file
    descriptor, laid_out = _held(path, _layer(buckets, offsets, total), total, deadline_s)
    try:
        yield SharedWeights(str(path), laid_out)
    finally:
        _leave(descriptor, path)


def _held(path: Path, lay_out: Callable[[int], None], total: int, deadline_s: float) -> tuple[int, bool]:
    """A descriptor with a shared lock on the complete file, and whether this call wrote it.

    The writer holds an exclusive lock. The kernel releases locks of processes that die.
    """
    until, laid_out = time.monotonic() + deadline_s, False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with contextlib.ExitStack() as unless_held:
            unless_held.callback(os.close, descriptor)
            if _owner(descriptor) != os.geteuid():
                raise PermissionError(f"{path} belongs to another user, who may have put it there; remove it")
            if _locked(descriptor, fcntl.LOCK_EX) and _is_there(descriptor) and not _is_complete(descriptor, total):
                lay_out(descriptor)
                laid_out = True
            if _locked(descriptor, fcntl.LOCK_SH) and _is_there(descriptor) and _is_complete(descriptor, total):
                unless_held.pop_all()
                return descriptor, laid_out
        if time.monotonic() > until:
            raise DeadlineExceeded("engine", "another engine of this node", f"laying out {path}", deadline_s)
        time.sleep(POLL_S)


def _leave(descriptor: int, path: Path) -> None:
    """Close the file, and remove it if no other process holds it; only one process can get the exclusive lock."""
    if _locked(descriptor, fcntl.LOCK_EX) and _is_there(descriptor):
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _remove_left(path: Path) -> None:
    """Remove files of other versions whose processes were killed."""
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
        _write(descriptor, memoryview(COMPLETE), total)

    return lay_out


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes; one call of pwrite writes at most 2 GiB."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _owner(descriptor: int) -> int:
    return os.fstat(descriptor).st_uid


def _is_complete(descriptor: int, total: int) -> bool:
    """Whether all buckets were written; the marker byte is written last."""
    return os.pread(descriptor, len(COMPLETE) + 1, total) == COMPLETE


def _is_there(descriptor: int) -> bool:
    """Whether the file has not been removed."""
    return os.fstat(descriptor).st_nlink > 0


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Start of each bucket, and the end; aligned to pages, so that any dtype can be viewed in place."""
    offsets, end = list[int](), 0
    for num_bytes in sizes:
        offsets.append(end)
        end += -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    return offsets, end


def _folder(file: str, num_bytes: int) -> Path:
    """Shared memory if it has room (containers often have 64 MiB), otherwise the temporary folder."""
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
