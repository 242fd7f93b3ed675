"""What a checkpoint's folder must hold: every file with its size and checksum, checked before it is gone on from."""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_ray.run_dir.durable import read_json, write_json

MANIFEST = "manifest.json"
DRIVER = "driver"
MOST_READERS = 8
"""Threads that read a checkpoint's files when it is checked: a storage of many nodes wants more than one."""
_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """What became of a file, as whoever wrote it has it."""

    num_bytes: int
    sha256: str
    by: str = DRIVER  # who wrote it


def write_manifest(folder: Path, *, stage: str, step: int, written: Mapping[str, WrittenFile]) -> None:
    """List all that lies in the folder; what is not in `written`, by its name below the folder, is the driver's own."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files: dict[str, dict[str, Any]] = {}
    for path in paths:
        name = str(path.relative_to(folder))
        file = written.get(name) or WrittenFile(num_bytes=path.stat().st_size, sha256=checksum(path))
        files[name] = {"bytes": file.num_bytes, "sha256": file.sha256, "by": file.by}
    if missing := sorted(written.keys() - files.keys()):
        raise FileNotFoundError(f"{missing[0]} of {written[missing[0]].by} is not in {folder}")
    write_json(folder / MANIFEST, {"stage": stage, "step": step, "files": files})


def writers(folder: Path) -> dict[str, int]:
    """How many files of a whole folder each of its writers wrote."""
    counts: dict[str, int] = {}
    for expected in read_json(folder / MANIFEST)["files"].values():
        counts[expected["by"]] = counts.get(expected["by"], 0) + 1
    return counts


def damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """What is wrong with the folder, naming the file and who wrote it; None where it is whole."""
    try:
        listed: dict[str, dict[str, Any]] = read_json(folder / MANIFEST)["files"]
        for name, expected in listed.items():
            path, of = folder / name, _of(expected["by"])
            if not path.is_file():
                return f"{name}{of} is missing"
            if (size := path.stat().st_size) != expected["bytes"]:
                return f"{name}{of} has {size:,} bytes, not {expected['bytes']:,}"
        if sizes_only:
            return None
        with ThreadPoolExecutor(min(MOST_READERS, os.cpu_count() or 1)) as readers:
            found = readers.map(checksum, [folder / name for name in listed])
            for (name, expected), sha256 in zip(listed.items(), found, strict=True):
                if sha256 != expected["sha256"]:
                    return f"{name}{_of(expected['by'])} is not what was written: its checksum differs"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as unreadable:
        return f"its {MANIFEST} cannot be read: {unreadable}"
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
