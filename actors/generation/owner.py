"""Ends an engine's processes when the process that started them has ended, for whatever reason.

vLLM's engine process does not notice that its client has ended, and would keep its device memory forever. Ray ends the
children of a worker that dies, but not when the whole node ends (the raylet or the driver of a local Ray was killed).
"""

import contextlib
import os
import select
import signal
import threading
import time

import psutil

from actors.cluster.process_start import start_time

OWNER = "RSTAR_ENGINE_OWNER"
GRACE_S = 10.0
"""Time for vLLM's shutdown, which frees shared memory."""


def owned_by_this() -> dict[str, str]:
    """Environment variables for processes that should end with this one."""
    return {OWNER: f"{os.getpid()} {start_time(os.getpid())}"}


def end_with_owner() -> None:
    """End this process, and its parent if that is not the owner, when the owner has ended."""
    pid, _, started = os.environ.get(OWNER, "").partition(" ")
    if not pid or int(pid) == os.getpid():
        return
    parents: list[int] = []
    if os.getppid() != int(pid):  # in a worker, the parent is vLLM's engine process
        with contextlib.suppress(OSError):  # ended already, or a kernel before 5.3 without pidfd_open
            parents.append(os.pidfd_open(os.getppid()))
    threading.Thread(
        target=_wait_and_end, args=(int(pid), started, parents), name="end-with-owner", daemon=True
    ).start()  # fmt: skip


def _wait_and_end(owner: int, started: str, parents: list[int]) -> None:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        descriptor = os.pidfd_open(owner)  # held before the start time is read: never that of a later process
        if start_time(owner) == started:
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            ended.poll()
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for parent in parents:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(parent, kind)
        os.kill(os.getpid(), kind)
        time.sleep(GRACE_S)
