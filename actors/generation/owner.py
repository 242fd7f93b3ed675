"""Ends an engine's processes with the process that started them, however that ended.

vLLM's engine process does not notice that its client is gone, and waits for requests forever, with its device
memory. Ray ends the children of a worker that dies, but leaves them behind when a whole node ends (the raylet
was killed, or the driver of a local Ray).
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
"""Of vLLM's own way to end, which gives back shared memory."""


def owned_by_this() -> dict[str, str]:
    """The environment of processes that should end with this one."""
    return {OWNER: f"{os.getpid()} {start_time(os.getpid())}"}


def end_with_owner() -> None:
    """From now on this process, and the one that started it where that is not the owner, end once the owner has."""
    pid, _, started = os.environ.get(OWNER, "").partition(" ")
    if not pid or int(pid) == os.getpid():
        return
    parents: list[int] = []
    if os.getppid() != int(pid):  # a worker's: vLLM's engine process
        with contextlib.suppress(OSError):  # gone already, or a kernel without such descriptors (before 5.3)
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
