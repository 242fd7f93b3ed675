"""Stable identity of a process: boot id and start time, because process ids are reused."""

from pathlib import Path

import psutil


def start_time(pid: int) -> str:
    """Boot id of this machine, and the process's start in kernel ticks since boot, which setting the clock does not
    change. Raises `psutil.NoSuchProcess`.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return f"{boot} {stat.rsplit(')', 1)[1].split()[19]}"
