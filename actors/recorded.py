"""Processes that outlive the command that starts them: recorded with their birth, so that no other is ever ended."""

import json
from pathlib import Path

import psutil


def record(path: Path, pid: int) -> None:
    """Write down the process with this id, which has just been started."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pid": pid, "created": psutil.Process(pid).create_time()}))


def recorded(path: Path) -> psutil.Process | None:
    """The one that was recorded, if that very process still runs."""
    try:
        saved = json.loads(path.read_text())
        process = psutil.Process(saved["pid"])
        return process if abs(process.create_time() - saved["created"]) < 1 else None
    except (OSError, ValueError, TypeError, LookupError, psutil.NoSuchProcess):  # none, or a damaged record
        return None


def end(path: Path, process: psutil.Process) -> None:
    """Terminate it and all its children, and forget it."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=20)
    for one in alive:
        one.kill()
    psutil.wait_procs(alive, timeout=10)
    path.unlink(missing_ok=True)
