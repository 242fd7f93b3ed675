"""What a checkpoint's folder must hold: every file with its size and checksum, checked before it is gone on from."""

import hashlib
from pathlib import Path

from rstar_ray.run_dir.durable import read_json, write_json

MANIFEST = "manifest.json"
_READ_BYTES = 2**20


def write_manifest(folder: Path, *, stage: str, step: int) -> None:
    """List all that lies in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in paths}
    write_json(folder / MANIFEST, {"stage": stage, "step": step, "files": files})


def damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """What is wrong with the folder, naming the file; None where it is whole."""
    try:
        listed = read_json(folder / MANIFEST)["files"]
        for name, expected in listed.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != expected["bytes"]:
                return f"{name} has {size:,} bytes, not {expected['bytes']:,}"
            if not sizes_only and checksum(path) != expected["sha256"]:
                return f"{name} is not what was written: its checksum differs"
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
