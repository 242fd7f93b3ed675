"""The control group of a worker, held by descriptors, because its files are not visible in a jail."""

import os


class ControlGroup:
    """A group that programs with processes join; the pool made it and bounds it (sandbox/cgroups.py)."""

    def __init__(self, path: str) -> None:
        """Open the group's files, with the process's current rights. Raises OSError."""
        self._members = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        self._usage = os.open(f"{path}/cpu.stat", os.O_RDONLY | os.O_CLOEXEC)
        self._used_before = 0.0

    def join(self) -> None:
        """Move this process into the group; its children start there. Raises OSError."""
        os.write(self._members, b"0")

    def can_be_joined(self) -> bool:
        """Try it in a child: kernels before 5.16 check the rights of the process that joins."""
        child = os.fork()
        if child == 0:
            try:
                self.join()
            except OSError:
                os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1] == 0

    def begin(self) -> None:
        """Count CPU time from now, for a new program."""
        self._used_before += self.cpu_s()

    def cpu_s(self) -> float:
        """CPU seconds since `begin` of all processes that are or were in the group."""
        for line in os.pread(self._usage, 4096, 0).splitlines():
            if line.startswith(b"usage_usec "):
                return int(line.split()[1]) / 1e6 - self._used_before
        return 0.0
