"""Stable identity of a process: boot id and start time, because process ids are reused."""

from pathlib import Path

import psutil


def start_time(pid: int) -> str:
    """The boot of this machine, and when since then the process with this id began, in ticks of the kernel.

    Not a time of day: what that says of a process changes when the clock is set. Raises `psutil.NoSuchProcess`.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return f"{boot} {stat.rsplit(')', 1)[1].split()[19]}"
