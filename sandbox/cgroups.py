"""Control groups (v2) for programs that may start processes, if groups are delegated to this process.

Each worker has one group, which its program and all its processes join. The kernel then counts memory, processes and
CPU time of the process tree. Without delegation every process is bounded separately (reason: `Groups.description`).
"""

import contextlib
import errno
import os
from pathlib import Path

ROOT_MOUNT = "cgroup2"
WANTED = ("memory", "pids")  # groups without these two are useless
_ENABLE = "+memory +pids"


class KernelTree:
    """The kernel's file system of control groups. Every method may raise OSError."""

    def read(self, path: str) -> str:
        return Path(path).read_text("ascii")

    def write(self, path: str, text: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def make(self, path: str) -> None:
        Path(path).mkdir()

    def remove(self, path: str) -> None:
        Path(path).rmdir()

    def is_delegated(self, path: str) -> bool:
        """Whether this user may create groups below `path`.

        For other users, permission to write is enough. Root can write everywhere, so `path` needs systemd's mark, or
        must be the root of a cgroup namespace other than the machine's (only that one has no `cgroup.type`).
        """
        needed = [path, f"{path}/cgroup.procs", f"{path}/cgroup.subtree_control"]
        if not all(os.access(each, os.W_OK) for each in needed):
            return False
        if os.geteuid() != 0:
            return True
        with contextlib.suppress(OSError):
            if {"user.delegate", "trusted.delegate"} & set(os.listxattr(path)):
                return True
        return path == mount_point() and Path(path, "cgroup.type").exists()


def mount_point() -> str:
    """Mount point of control groups v2; empty if they are not mounted."""
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == ROOT_MOUNT:
            return before.split()[4]
    return ""


def own_group() -> str:
    """The folder of this process's group; empty without v2."""
    top = mount_point()
    for line in Path("/proc/self/cgroup").read_text("ascii").splitlines() if top else ():
        if line.startswith("0::"):
            return (top + line[3:]).rstrip("/")
    return ""


class Groups:
    """The groups of one pool's workers; none if `place` is empty."""

    def __init__(self, tree: KernelTree, place: str, description: str, prefix: str) -> None:
        self._tree = tree
        self._place = place
        self._prefix = prefix
        self._spent: set[str] = set()  # to be removed when their processes have ended
        self._kills: dict[int, int] = {}  # processes killed for memory, by worker
        self.description = description  # resources that the kernel counts, or the reason why there are no groups

    def make(self, number: int, max_processes: int) -> str:
        """Create the group of a new worker; empty if there are no groups. Raises OSError."""
        if not self._place:
            return ""
        path = self._path(number)
        self._spent.discard(path)
        self._kills[number] = 0
        with contextlib.suppress(FileExistsError):
            self._tree.make(path)
        self._tree.write(f"{path}/pids.max", str(max_processes))
        self._tree.write(f"{path}/memory.oom.group", "1")  # kill the whole tree
        with contextlib.suppress(FileNotFoundError):  # fails on machines without swap
            self._tree.write(f"{path}/memory.swap.max", "0")
        self._kills[number] = self._count_kills(number)
        return path

    def bound(self, number: int, memory_bytes: int) -> None:
        """Set the memory limit of a worker's next program, for all its processes and files together."""
        if self._place:
            with contextlib.suppress(OSError):  # the previous program still uses more: rlimits bound this one
                self._tree.write(f"{self._path(number)}/memory.max", str(memory_bytes))

    def ran_out(self, number: int) -> bool:
        """Whether the kernel has killed processes of this worker for memory since the last call."""
        if not self._place:
            return False
        before, self._kills[number] = self._kills.get(number, 0), self._count_kills(number)
        return self._kills[number] > before

    def _count_kills(self, number: int) -> int:
        with contextlib.suppress(OSError, ValueError):
            for line in self._tree.read(f"{self._path(number)}/memory.events").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self, number: int) -> None:
        """Kill the remaining processes in a worker's group, and remove the group."""
        if not self._place:
            return
        self._kills.pop(number, None)
        self._spent.add(self._path(number))
        self.sweep()

    def remove_all(self) -> None:
        """Remove all groups when the pool closes."""
        for number in list(self._kills):
            self.remove(number)

    def sweep(self) -> bool:
        """Remove the groups whose processes have ended; True if none remains."""
        for path in list(self._spent):
            with contextlib.suppress(OSError):
                self._tree.write(f"{path}/cgroup.kill", "1")
            try:
                self._tree.remove(path)
            except FileNotFoundError:
                pass
            except OSError:
                continue  # its last process is still exiting
            self._spent.discard(path)
        return not self._spent

    def _path(self, number: int) -> str:
        return f"{self._place}/{self._prefix}-{number}"


def find_groups(prefix: str, tree: KernelTree | None = None, own: str | None = None) -> Groups:
    """Groups below this process's group or its parent, whichever is delegated and usable.

    A group with processes cannot have child groups with controllers, so this process moves to a child group if it is
    alone in its group.
    """
    tree = tree or KernelTree()
    own = own_group() if own is None else own
    if not own:
        return Groups(tree, "", "none: no cgroup v2 is mounted here", prefix)
    reasons: list[str] = []
    for place in (own, own.rpartition("/")[0]):
        try:
            if place and tree.is_delegated(place):
                counted = _enable(tree, place, own)
                return Groups(tree, place, counted, prefix)
            reasons.append(f"{place or '/'} is not delegated to this user")
        except OSError as error:
            reasons.append(f"{place}: {error.strerror}")
    return Groups(tree, "", f"none: {'; '.join(reasons)}", prefix)


def _enable(tree: KernelTree, place: str, own: str) -> str:
    """Enable controllers below `place`; returns a description of the counted resources. Raises OSError."""
    there = tree.read(f"{place}/cgroup.controllers").split()
    if missing := [name for name in WANTED if name not in there]:
        raise OSError(errno.ENOTSUP, f"no controller for {' and '.join(missing)}")
    if set(WANTED) - set(tree.read(f"{place}/cgroup.subtree_control").split()):
        try:
            tree.write(f"{place}/cgroup.subtree_control", _ENABLE)
        except OSError as error:
            if (
                error.errno != errno.EBUSY
                or place != own
                or tree.read(f"{own}/cgroup.procs").split() != [str(os.getpid())]
            ):
                raise
            with contextlib.suppress(FileExistsError):
                tree.make(f"{own}/pool")
            tree.write(f"{own}/pool/cgroup.procs", str(os.getpid()))
            tree.write(f"{place}/cgroup.subtree_control", _ENABLE)
    return "memory, processes and CPU time of a program with processes"
