"""Files that survive a crash: atomic writes, and rows of JSON whose torn last line is removed."""

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rstar_ray.errors import ConfigError

DAMAGED = "restore it from a backup, or name another run directory"
"""The hint for a file that was damaged after it was written."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors for a full disk, an exhausted quota, and a file size limit."""


def unwritable(path: Path, refused: OSError) -> ConfigError:
    """The `ConfigError` for a path that the operating system refuses to write when a run starts."""
    full = refused.errno in NO_ROOM
    hint = "free space, then run the same command" if full else "name a directory that can be written"
    return ConfigError("--run-dir", f"{path}: {refused.strerror or refused}", hint)


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file that becomes `path` at the end of the block, unless it raises.

    A reader, also after a crash, sees the old file or the new one, never a part. A raised `OSError` has the file's
    name.
    """
    # Named by the thread: several of one process may write at once.
    partial = path.with_name(f".tmp-{path.name}-{threading.get_native_id()}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as failed:
        partial.unlink(missing_ok=True)
        if isinstance(failed, OSError):
            failed.filename = failed.filename or str(path)  # a failed write does not set it
        raise
    sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Rename and remove a folder: also after a crash in between, no reader takes the rest for a checkpoint."""
    doomed = folder if folder.name.startswith(".tmp-") else folder.with_name(f".tmp-removed-{folder.name}")
    if doomed != folder:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `path` atomically, as `replacing`."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write `value` atomically as indented JSON; non-finite numbers become null."""
    write_text(path, _to_json(value, indent=2))


def read_json(path: Path) -> Any:
    """Raises `ConfigError` where the file cannot be read as JSON, `FileNotFoundError` where it does not exist."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as refused:
        raise ConfigError(str(path), f"cannot be read ({refused.strerror})", DAMAGED) from refused
    except ValueError as broken:
        raise ConfigError(str(path), f"not JSON ({broken})", DAMAGED) from broken


def read_object(path: Path, *names: str) -> dict[str, Any]:
    """As `read_json`. Raises `ConfigError` too where the value is not an object with the keys `names`."""
    value = read_json(path)
    if not isinstance(value, dict) or not value.keys() >= set(names):
        raise ConfigError(str(path), f"no object with {', '.join(names) or 'names'}", DAMAGED)
    return value


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries (names, renames) to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, and `folder` itself, to disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(root))


def to_row(row: Mapping[str, object]) -> str:
    """One line of JSON with its newline; non-finite numbers become null."""
    return _to_json(row)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows. A last line without a newline was torn by a crash and is skipped.

    Empty where the file does not exist. Raises `ConfigError` with the line number where another line is not a JSON
    object.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is empty or torn
    except OSError as refused:
        raise ConfigError(str(path), f"cannot be read ({refused.strerror})", DAMAGED) from refused
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as broken:
            raise ConfigError(f"{path}, line {number}", f"not JSON ({broken})", DAMAGED) from broken
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}", "no object", DAMAGED)
        rows.append(row)
    return rows


def append_row(path: Path, row: Mapping[str, object], *, sync: bool = False) -> None:
    """Append one row. A torn last line is removed first, so that the new row starts on its own line.

    With `sync` the row is flushed to disk before the function returns.
    """
    remove_torn_row(path)
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(to_row(row))
        if sync:
            file.flush()
            os.fsync(file.fileno())
    if sync and new:
        sync_folder(path.parent)


def remove_torn_row(path: Path) -> None:
    """Remove a torn last line."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file:  # at each step: only the last byte of a long file is read
        file.seek(-1, os.SEEK_END)
        torn = file.read(1) != b"\n"
    if torn:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def cut_rows(path: Path, *, stage: str, after_step: int) -> int:
    """Drop the rows of `stage` with a step above `after_step`, in one atomic rewrite; returns the number of rows."""
    remove_torn_row(path)
    rows = read_rows(path)
    kept = [row for row in rows if row.get("stage") != stage or row["step"] <= after_step]
    if len(kept) < len(rows):
        write_text(path, "".join(map(to_row, kept)))
    return len(rows) - len(kept)


def _to_json(value: object, indent: int | None = None) -> str:
    """Readable JSON. Half a surrogate pair, which UTF-8 does not have, is written as JSON's own escape of it."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
