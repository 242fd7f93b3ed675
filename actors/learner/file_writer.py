"""Files written beside what a rank does next, in a separate thread, and what became of them."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rstar_ray.run_dir.durable import sync_folder
from rstar_ray.run_dir.manifest import WrittenFile, checksum

Write = Callable[[], Sequence[Path]]
"""Writes files and names them."""


class FileWriter:
    """One job after another, from when it is asked for what was written: what is handed in before is copied meanwhile,
    which a step waits for, and a thread that writes would take the interpreter and the memory's bandwidth from it.
    """

    def __init__(self, by: str) -> None:
        """`by`: whose files they are."""
        self._by = by
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")
        self._handed: list[Write] = []

    def hand(self, write: Write) -> None:
        """Return at once."""
        self._handed.append(write)

    def written(self) -> dict[Path, WrittenFile]:
        """Write all that was handed in since this was asked last, and wait for it; raises what kept the first that
        failed from being written."""
        handed, self._handed = self._handed, []
        files: dict[Path, WrittenFile] = {}
        jobs = [self._thread.submit(self._written, write) for write in handed]
        handed.clear()  # a copy goes as soon as it is written
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
        """What has not begun is not written."""
        self._thread.shutdown(wait=True, cancel_futures=True)
