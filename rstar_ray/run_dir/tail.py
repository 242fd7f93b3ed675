"""Incremental reading of rows of JSON from a file that another process may be appending to."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO


class GrowingRows:
    """Rows with the keys `needs`. Any other line is skipped and listed in `faults`. A last line without a newline is
    read later, when it is complete."""

    def __init__(self, path: Path, *needs: str) -> None:
        self._path = path
        self._needs = set(needs)
        self._file: tuple[int, int] | None = None  # device and inode
        self._position = 0
        self._lines = 0
        self.rows: list[dict[str, Any]] = []
        self.faults: list[str] = []

    def read(self) -> bool:
        """Read new rows; True if rows or faults changed. A file that was replaced is read from its start."""
        try:
            with self._path.open("rb") as file:
                return self._take(file)
        except FileNotFoundError:
            had_rows = bool(self.rows)
            self._forget()
            return had_rows
        except OSError as refused:
            self._forget()
            self.faults.append(f"{self._path.name} cannot be read ({refused.strerror})")
            return True

    def _take(self, file: BinaryIO) -> bool:
        status = os.fstat(file.fileno())
        changed = self._file != (status.st_dev, status.st_ino) or status.st_size < self._position
        if changed:
            self._forget()
            self._file = status.st_dev, status.st_ino
        file.seek(self._position)
        whole, newline, _ = file.read().rpartition(b"\n")
        if not newline:
            return changed
        self._position += len(whole) + 1
        for line in whole.split(b"\n"):
            self._lines += 1
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and row.keys() >= self._needs:
                self.rows.append(row)
            else:
                kind = "JSON" if row is None or not self._needs else f"JSON with {', '.join(sorted(self._needs))}"
                self.faults.append(f"{self._path.name}, line {self._lines} is not a row of {kind} and is ignored")
        return True

    def _forget(self) -> None:
        self._file, self._position, self._lines = None, 0, 0
        self.rows, self.faults = [], []
