"""Processes that outlive the command that starts them: recorded with their start time, so that only they are killed."""

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from actors.cluster.process_start import start_time
from rstar_ray.errors import ConfigError, DeadlineExceeded


class Sign(NamedTuple):
    """Signs by which a process is known to be ready."""

    asked: urllib.request.Request  # must be answered
    says: str = ""  # must be in the log


def start(
    path: Path,
    command: Sequence[str],
    sign: Sign,
    *,
    log: Path,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start a process in a separate session with its output in `log`, record it at `path`, and wait until it is ready.

    A process that is not ready in time is ended. Raises `ConfigError` with its last line if it has exited, and
    `DeadlineExceeded`.
    """
    with log.open("w") as output:
        started = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    record(path, started.pid)
    try:
        _wait(started, Path(command[0]).name, sign, log, deadline_s)
    except BaseException:
        if (process := recorded(path)) is not None:
            end(path, process)
        raise


def _wait(started: "subprocess.Popen[bytes]", name: str, sign: Sign, log: Path, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if started.poll() is not None:
            raise ConfigError(
                name, f"it ended: {log.read_text(errors='replace').strip().splitlines()[-1:]}", f"see {log}"
            )
        try:
            with urllib.request.urlopen(sign.asked, timeout=2):
                if sign.says in log.read_text(errors="replace"):
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise DeadlineExceeded(name, "an answer", sign.asked.full_url, deadline_s)


def record(path: Path, pid: int) -> None:
    """Record the process with this id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pid": pid, "birth": start_time(pid)}))


def recorded(path: Path) -> psutil.Process | None:
    """The recorded process if it still runs, otherwise None."""
    try:
        saved = json.loads(path.read_text())
        process = psutil.Process(saved["pid"])
        return process if start_time(process.pid) == saved["birth"] else None
    except (OSError, ValueError, TypeError, LookupError, psutil.NoSuchProcess):  # no record, or a damaged one
        return None


def end(path: Path, process: psutil.Process) -> None:
    """Terminate a process and its children, and delete the record."""
    alive: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        alive = [process, *process.children(recursive=True)]
        process.terminate()
    _, alive = psutil.wait_procs(alive, timeout=20)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(alive, timeout=10)
    path.unlink(missing_ok=True)
