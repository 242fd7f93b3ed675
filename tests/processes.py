"""Processes that tests look at from outside."""

import os
import signal
import time
from contextlib import suppress

import psutil


def descendants() -> set[int]:
    """The ids of what this process has started, and of what those have, that has not ended."""
    found = set[int]()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


def wait_for_end(pid: int) -> None:
    """Of a process that others started; killed if it does not come."""
    deadline_s = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"process {pid} lives on")
            time.sleep(0.01)
