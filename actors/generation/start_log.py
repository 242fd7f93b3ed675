"""Finds the reason why vLLM did not start in the output of its processes.

vLLM's error only says that its engine process failed ("See root cause above"). The traceback is in the output that the
engine process inherits from this process. Ray stores an actor's output in files below `/tmp/ray/session_latest/logs`,
which this module reads.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

OUTPUTS = (1, 2)  # descriptors: vLLM logs to stdout, Python writes tracebacks to stderr
READ_BYTES = 64 * 2**10
TAIL_LINES = 30
ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Exit)\b: .+")
FOLLOWS = "initialization failed"
"""Part of vLLM's errors for a failed child process, which has already written the cause."""


@dataclass(frozen=True, slots=True)
class Wrote:
    """Output since a `StartLog` was created."""

    cause: str  # the last error that is not a consequence of another; empty if there is none
    tail: tuple[str, ...]  # last lines
    path: str  # file with the full output


class StartLog:
    """Remembers the current end of this process's output; inactive if the output is not a file."""

    def __init__(self, outputs: tuple[int, ...] = OUTPUTS) -> None:
        self._ends = {output: os.fstat(output).st_size for output in outputs if _is_file(output)}

    def wrote(self) -> Wrote | None:
        """By this process and its children since; None where the output is not a file, or has no error."""
        found = [wrote for output, end in self._ends.items() if (wrote := _read(output, end)) is not None]
        with_cause = [wrote for wrote in found if wrote.cause]
        return with_cause[0] if with_cause else None


def _is_file(output: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(output).st_mode)
    except OSError:  # closed
        return False


def _read(output: int, start: int) -> Wrote | None:
    path = Path(f"/proc/self/fd/{output}")
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        named = str(path.readlink())
    except OSError:
        return None
    errors = [match[0] for line in lines if (match := ERROR.search(line)) and FOLLOWS not in line]
    return Wrote(errors[-1].strip() if errors else "", tuple(line for line in lines if line)[-TAIL_LINES:], named)
