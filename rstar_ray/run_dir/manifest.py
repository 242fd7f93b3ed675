"""What a checkpoint's folder must hold: every file with its size and checksum, checked before a run resumes from it."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_ray.errors import RStarError
from rstar_ray.run_dir.durable import read_json, write_json

MANIFEST = "manifest.json"
OWN_SHA256 = "sha256"
"""In a manifest: the checksum of the rest of it."""
SET_ASIDE = "damaged-"
"""How the name of a checkpoint's folder begins that was found damaged, and passed over."""
DRIVER = "driver"
MOST_READERS = 8
"""Threads that read a checkpoint's files when it is checked: a storage of many nodes wants more than one."""
_READ_BYTES = 2**20
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Of the errors of an operating system those that say what lies there; any other says that nobody can tell now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """What became of a file, as whoever wrote it has it."""

    num_bytes: int
    sha256: str
    by: str = DRIVER  # who wrote it


class Unreadable(RStarError):
    """A checkpoint is there and cannot be read now, which says nothing of what it holds."""


def unreadable(path: Path, refused: OSError) -> Unreadable:
    return Unreadable(
        f"{refused.filename or path} cannot be read ({refused.strerror or refused}), and the checkpoint may be whole: "
        "see that its file system is there and lets this account read it; the same command then resumes"
    )


def own_file(path: Path) -> WrittenFile:
    """A file that this process wrote itself, as it lies there."""
    return WrittenFile(num_bytes=path.stat().st_size, sha256=checksum(path))


def write_manifest(folder: Path, *, stage: str, step: int, written: Mapping[str, WrittenFile] | None = None) -> None:
    """List all that lies in the folder, as those said who wrote it, by its name below the folder.

    Without `written` all of it is the driver's own. Raises `RStarError` for a file that nobody said to be whole, and
    for one that is not there.
    """
    there = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if written is None:
        written = {name: own_file(path) for name, path in there.items()}
    if missing := sorted(written.keys() - there.keys()):
        raise RStarError(f"{missing[0]} of {written[missing[0]].by} is not in {folder}")
    if untold := sorted(there.keys() - written.keys()):
        raise RStarError(f"{untold[0]} lies in {folder}, and nobody has said that it is whole")
    files = {name: {"bytes": w.num_bytes, "sha256": w.sha256, "by": w.by} for name, w in sorted(written.items())}
    told = {"stage": stage, "step": step, "files": files}
    write_json(folder / MANIFEST, told | {OWN_SHA256: _checksum_of(told)})


def checkpoint_name(stage: str, step: int) -> str:
    """`stage1-step-000010`; trajectory files share the form."""
    assert re.fullmatch(r"[A-Za-z0-9_]+", stage), f"a stage is named by letters, digits and _: {stage!r}"
    return f"{stage}-step-{step:06d}"


def writers(folder: Path) -> dict[str, int]:
    """How many files of a whole folder each of its writers wrote."""
    counts: dict[str, int] = {}
    for expected in read_json(folder / MANIFEST)["files"].values():
        counts[expected["by"]] = counts.get(expected["by"], 0) + 1
    return counts


def damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """What is wrong with the folder, naming the file and who wrote it; None where it is whole.

    Raises `Unreadable` where that cannot be told now: a file that is there does not let itself be read.
    """
    try:
        return _damage(folder, sizes_only=sizes_only)
    except OSError as refused:
        raise unreadable(folder, refused) from refused


def _damage(folder: Path, *, sizes_only: bool) -> str | None:
    try:
        told: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        if wrong := _odd(told, folder):
            return f"its {MANIFEST} {wrong}"
        listed: dict[str, dict[str, Any]] = told["files"]
        expected = {name: (entry["bytes"], entry["sha256"], _of(entry["by"])) for name, entry in listed.items()}
        for name, (num_bytes, _, of) in expected.items():
            size = _size(folder / name)
            if size is None:
                return f"{name}{of} is missing"
            if size != num_bytes:
                return f"{name}{of} has {size:,} bytes, not {num_bytes:,}"
    except _NO_FILE as gone:
        return f"its {MANIFEST} cannot be read: {gone.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as nonsense:
        return f"its {MANIFEST} cannot be read: {nonsense}"
    if sizes_only:
        return None
    with ThreadPoolExecutor(min(MOST_READERS, os.cpu_count() or 1)) as readers:
        found = readers.map(_checksum_if_there, [folder / name for name in expected])
        for (name, (_, sha256, of)), seen in zip(expected.items(), found, strict=True):
            if seen != sha256:
                return f"{name}{of} is " + ("missing" if seen is None else "not what was written: its checksum differs")
    return None


def _odd(told: dict[str, Any], folder: Path) -> str | None:
    """What shows, without a look at the files, that the manifest is not what was written, or of another folder."""
    rest = {name: value for name, value in told.items() if name != OWN_SHA256}
    if told.keys() != {"stage", "step", "files", OWN_SHA256}:
        return f"has other names than stage, step, files and {OWN_SHA256}"
    if told[OWN_SHA256] != _checksum_of(rest):
        return "is not what was written: its own checksum differs"
    stage, _, step = folder.name.removeprefix(SET_ASIDE).rpartition("-step-")
    if told["stage"] != stage or f"{told['step']:06d}" != step:
        return f"is of step {told['step']} of {told['stage']}, which its folder's name does not say"
    return None


def _checksum_of(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int | None:
    """None where there is no such file."""
    try:
        status = path.stat()
    except _NO_FILE:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _checksum_if_there(path: Path) -> str | None:
    try:
        return checksum(path)
    except _NO_FILE:
        return None


def checksum(path: Path) -> str:
    """SHA-256 of the file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _of(writer: str) -> str:
    return "" if writer == DRIVER else f" of {writer}"
