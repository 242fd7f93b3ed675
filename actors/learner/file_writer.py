"""Writes a rank's files in a separate thread, while the rank trains, and reports the files that are on disk."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rstar_ray.run_dir.durable import sync_folder
from rstar_ray.run_dir.manifest import WrittenFile, checksum

Write = Callable[[], Sequence[Path]]
"""Writes files and returns their paths."""


class FileWriter:
    """Writes one job after another, from the call of `written` on.

    It does not start earlier: the rank may still be copying other jobs to host memory, which a step waits for, and a
    writing thread would compete for the interpreter and for memory bandwidth.
    """

    def __init__(self, by: str) -> None:
        """`by`: name of the rank, recorded with each file."""
        self._by = by
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")
        self._handed: list[Write] = []

    def hand(self, write: Write) -> None:
        """Queue a job; returns immediately."""
        self._handed.append(write)

    def written(self) -> dict[Path, WrittenFile]:
        """Write all jobs queued since the last call, wait for them, and return their files.

        Raises the exception of the first job that failed.
        """
        handed, self._handed = self._handed, []
        files: dict[Path, WrittenFile] = {}
        jobs = [self._thread.submit(self._written, write) for write in handed]
        handed.clear()  # frees each copy as soon as it is written
        for job in jobs:
            files |= job.result()
        return files

    def _written(self, write: Write) -> dict[Path, WrittenFile]:
        files: dict[Path, WrittenFile] = {}
        for path in write():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[path] = WrittenFile(num_bytes=path.stat().st_size, sha256=checksum(path), by=self._by)
        for folder in {path.parent for path in files}:
            sync_folder(folder)
        return files

    def close(self) -> None:
        """Wait for the running job; jobs that have not started are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
