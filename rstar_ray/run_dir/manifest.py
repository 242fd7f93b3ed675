"""The manifest of a checkpoint: each file's size and checksum, which a run checks before it resumes from it."""

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
"""Key in a manifest: the checksum of its other entries."""
QUARANTINED = "damaged-"
"""Prefix of the folder of a quarantined checkpoint, which was found damaged."""
DRIVER = "driver"
MOST_READERS = 8
"""Threads that read a checkpoint's files for a check: distributed storage needs more than one for its bandwidth."""
_READ_BYTES = 2**20
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that prove that there is no such file. Any other `OSError` leaves the state of the file unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file's size and checksum, as reported by the process that wrote it."""

    num_bytes: int
    sha256: str
    by: str = DRIVER  # the process that wrote it


class Unreadable(RStarError):
    """A checkpoint cannot be read at the moment; it may be undamaged."""


def unreadable(path: Path, refused: OSError) -> Unreadable:
    return Unreadable(
        f"{refused.filename or path} cannot be read ({refused.strerror or refused}), and the checkpoint may be intact: "
        "check that its file system is mounted and readable by this account; the same command then resumes"
    )


def own_file(path: Path) -> WrittenFile:
    """Size and checksum of a file that this process wrote."""
    return WrittenFile(num_bytes=path.stat().st_size, sha256=checksum(path))


def write_manifest(folder: Path, *, stage: str, step: int, written: Mapping[str, WrittenFile] | None = None) -> None:
    """Write the manifest of all files in the folder, with the sizes and checksums that their writers reported.

    `written`: by name below the folder; None if the driver wrote all files. Raises `RStarError` for a file that no
    writer reported, and for a reported file that does not exist.
    """
    there = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if written is None:
        written = {name: own_file(path) for name, path in there.items()}
    if missing := sorted(written.keys() - there.keys()):
        raise RStarError(f"{missing[0]} of {written[missing[0]].by} is not in {folder}")
    if unreported := sorted(there.keys() - written.keys()):
        raise RStarError(f"{unreported[0]} is in {folder}, but no writer reported its checksum")
    files = {name: {"bytes": w.num_bytes, "sha256": w.sha256, "by": w.by} for name, w in sorted(written.items())}
    entries = {"stage": stage, "step": step, "files": files}
    write_json(folder / MANIFEST, entries | {OWN_SHA256: _checksum_of(entries)})


def checkpoint_name(stage: str, step: int) -> str:
    """`stage1-step-000010`; trajectory files are named in the same way."""
    assert re.fullmatch(r"[A-Za-z0-9_]+", stage), f"a stage is named by letters, digits and _: {stage!r}"
    return f"{stage}-step-{step:06d}"


def writers(folder: Path) -> dict[str, int]:
    """Number of files by writer, of an undamaged folder."""
    counts: dict[str, int] = {}
    for expected in read_json(folder / MANIFEST)["files"].values():
        counts[expected["by"]] = counts.get(expected["by"], 0) + 1
    return counts


def damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """The first fault of the folder, with the file and its writer; None where it is undamaged.

    Raises `Unreadable` where a file exists but cannot be read at the moment.
    """
    try:
        return _damage(folder, sizes_only=sizes_only)
    except OSError as refused:
        raise unreadable(folder, refused) from refused


def _damage(folder: Path, *, sizes_only: bool) -> str | None:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        if fault := _manifest_fault(manifest, folder):
            return f"its {MANIFEST} {fault}"
        listed: dict[str, dict[str, Any]] = manifest["files"]
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
                return f"{name}{of} is " + ("missing" if seen is None else "damaged: its checksum differs")
    return None


def _manifest_fault(manifest: dict[str, Any], folder: Path) -> str | None:
    """A fault that shows without reading the files: the manifest was changed, or belongs to another folder."""
    rest = {name: value for name, value in manifest.items() if name != OWN_SHA256}
    if manifest.keys() != {"stage", "step", "files", OWN_SHA256}:
        return f"has other keys than stage, step, files and {OWN_SHA256}"
    if manifest[OWN_SHA256] != _checksum_of(rest):
        return "does not match its own checksum"
    stage, _, step = folder.name.removeprefix(QUARANTINED).rpartition("-step-")
    if manifest["stage"] != stage or f"{manifest['step']:06d}" != step:
        return f"is of step {manifest['step']} of {manifest['stage']}, which is not its folder's name"
    return None


def _checksum_of(entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int | None:
    """Size in bytes; None where there is no such file."""
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
