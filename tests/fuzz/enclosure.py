"""Separate pid, mount, IPC and network namespaces: signals to all processes do not leave them."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sandbox.jail import kernel

DISK_OPTIONS = "size=2g,mode=1777"
_APART = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET


def enclosed(work: Callable[[Path], int]) -> int:
    """Run `work` with a folder on a separate file system, as the second process of fresh namespaces.

    Returns its exit status. All processes that it started end with it: the kernel ends a pid namespace with its first
    process. Raises OSError if namespaces are not available.
    """
    sys.stdout.flush()
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    place.chmod(0o755)
    try:
        outer = os.fork()
        if outer == 0:
            os._exit(_outer(work, place))
        return os.waitstatus_to_exitcode(os.waitpid(outer, 0)[1])
    finally:
        place.rmdir()


def _outer(work: Callable[[Path], int], place: Path) -> int:
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
        _unshare()
    except OSError as error:
        print(
            f"error: no pid namespace here ({error}); run as root, or where users may have namespaces", file=sys.stderr
        )
        return 2
    first = os.fork()
    if first == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
        os._exit(_first_process(work, place))
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _unshare() -> None:
    if os.geteuid() == 0:
        kernel.unshare(_APART)
        return
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | _APART)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def _first_process(work: Callable[[Path], int], place: Path) -> int:
    """Reap orphans until the second process has ended."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount("tmpfs", str(place), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, DISK_OPTIONS)
    second = os.fork()
    if second == 0:
        if os.geteuid() != 0:
            kernel.set_capabilities(0)
        try:
            os._exit(work(place))
        finally:
            os._exit(3)
    while True:
        ended, status = os.wait()
        if ended == second:
            return os.waitstatus_to_exitcode(status) & 0xFF
