"""Invariants for all programs: nothing outside changes, no data of a program remains, the statistics are consistent."""

import ast
import asyncio
import contextlib
import os
import resource
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rstar_ray.outcome import Outcome
from sandbox.pool import SandboxPool
from sandbox.pool_metrics import PoolStats
from sandbox.request import ExecutionRequest, ExecutionResult
from tests import derived
from tests.fuzz.programs import MARK, MIB

MAX_DISK_BYTES = 1024 * MIB  # at landlock a program may exceed its 64 MiB until the next scan
MAX_GROWTH_BYTES = 512 * MIB  # of all processes in the pid namespace that do not run a program
QUIET_S = 20.0  # limit until processes, folders and memory of ended programs are gone
PATIENT = derived.program(cpu_s=30.0, wall_s=120.0, stdout_chars=200_000)

# Prints the environment of a fresh program. `{search}`: whether it searches its memory for marks of earlier ones.
CENSUS = r"""
import os, resource, signal, sys, threading, ctypes, re
def tell(look, *arguments):
    try:
        return look(*arguments)
    except Exception as error:
        return f"{type(error).__name__} {error}"
def is_open(number):
    try:
        return os.fstat(number).st_mode & 0o170000
    except OSError:
        return None
found = dict(
    files=sorted(os.listdir(".")), folder=oct(os.stat(".").st_mode), links=os.stat(".").st_nlink,
    attributes=tell(os.listxattr, "."), descriptors=[(n, is_open(n)) for n in range(256) if is_open(n)],
    environment=sorted((name, value) for name, value in os.environ.items() if value not in (os.getcwd(), "tool")),
    handlers=[str(tell(signal.getsignal, n)) for n in range(1, 65)],
    blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    pending=sorted(signal.sigpending()), limits=[tell(resource.getrlimit, n) for n in range(16)],
    nice=os.getpriority(os.PRIO_PROCESS, 0), policy=os.sched_getscheduler(0), cores=sorted(os.sched_getaffinity(0)),
    timers=[signal.getitimer(n) for n in range(3)], threads=threading.active_count(), umask=os.umask(0o22),
    modules=len(sys.modules), recursion=sys.getrecursionlimit(), path=sys.path, stdin=sys.stdin.read(),
    dumpable=ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), arguments=sys.argv,
)
if {private}:
    room = os.statvfs(".")
    pids = os.listdir("/proc") if os.path.isdir("/proc/1") else []
    found.update(room=room.f_bfree, entries=room.f_ffree, host=os.uname().nodename, shared=os.listdir("/dev/shm"))
    found.update(others=[pid for pid in pids if pid.isdigit() and int(pid) not in (1, os.getpid())])
left = []
if {search}:
    try:
        maps = list(open("/proc/self/maps"))
    except OSError:
        maps = []
    for line in maps:
        span, mode, *rest = line.split()
        if mode.startswith("rw") and "[v" not in line:
            low, high = (int(end, 16) for end in span.split("-"))
            left += re.findall(rb"{mark}[-][0-9]+[-]", ctypes.string_at(low, high - low))
found["marks"] = sorted(set(left))
print(found)
"""

# A benign program that runs beside the generated ones; it prints `fine` unless another program affects it.
BYSTANDER = """
import os, signal, time
heard = []
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, lambda n, _: heard.append(n))
mine = os.urandom(64)
with open("mine", "wb") as file: file.write(mine)
mode = os.stat("mine").st_mode
for _ in range(15):
    time.sleep(0.01)
    assert open("mine", "rb").read() == mine and os.stat("mine").st_mode == mode
assert os.listdir(".") == ["mine"] and not heard, heard
print("fine", sum(range(1000)))
"""


@dataclass
class Canaries:
    """Files and a process that any user of the machine could change, but no program may."""

    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    def __enter__(self) -> "Canaries":
        self.home = self.folder / "canaries"
        self.home.mkdir()
        self.home.chmod(0o777)
        for name, mode in (("open", 0o666), ("closed", 0o600)):
            (self.home / name).write_text(self.secret * 10)
            (self.home / name).chmod(mode)
            os.utime(self.home / name, (1e9, 1e9))
        os.utime(self.home, (1e9, 1e9))
        os.environ["FUZZ_SECRET"] = self.secret
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
        time.sleep(0.2)
        self._before = self.look()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def places(self) -> tuple[str, ...]:
        """Paths for programs to try."""
        return (str(self.home), *(str(self.home / name) for name in ("open", "closed", "new")), str(self.folder))

    def look(self) -> dict[str, object]:
        """All their properties that a program could change."""
        about = [place.stat() for place in (self.home, self.home / "open", self.home / "closed")]
        pid = self.process.pid
        seen: dict[str, object] = {
            "files": sorted(entry.name for entry in self.home.iterdir()),
            "texts": [(self.home / name).read_text() for name in ("open", "closed")],
            "metadata": [(each.st_mode, each.st_uid, each.st_nlink, each.st_size, each.st_mtime) for each in about],
            "attributes": os.listxattr(self.home / "open"),
            "state": "gone",
        }
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            seen |= {
                "nice": os.getpriority(os.PRIO_PROCESS, pid),
                "cores": os.sched_getaffinity(pid),
                "limits": [resource.prlimit(pid, which) for which in range(16)],
                "state": Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "SRD",
            }
        return seen

    def wrong(self) -> list[str]:
        """The changes since the beginning."""
        now = self.look()
        return [
            f"canary {name}: {self._before.get(name)} became {now[name]}"
            for name in now
            if now[name] != self._before.get(name)
        ]


@dataclass(frozen=True, slots=True)
class Machine:
    """The state outside all jails, which programs must not change."""

    mounts: list[str]
    ipc: dict[str, str]
    processes: list[str]  # in this pid namespace
    folders: list[str]
    descriptors: int
    resident_bytes: int  # of all processes together
    disk_bytes: int

    @staticmethod
    def now(folder: Path) -> "Machine":
        processes: list[str] = []
        resident = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    resident += int((entry / "statm").read_text().split()[1])
                    processes.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:60]!r}")
        return Machine(
            mounts=Path("/proc/self/mountinfo").read_text().splitlines(),
            ipc={kind: (Path("/proc/sysvipc") / kind).read_text() for kind in ("shm", "sem", "msg")},
            processes=processes,
            folders=sorted(entry.name for entry in folder.iterdir()),
            descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            resident_bytes=resident * resource.getpagesize(),
            disk_bytes=used_bytes(folder),
        )

    def wrong(self, now: "Machine") -> list[str]:
        """The differences to an earlier state."""
        found = [
            f"{name} {getattr(self, name)} became {getattr(now, name)}"
            for name in ("mounts", "ipc", "folders")
            if getattr(self, name) != getattr(now, name)
        ]
        if len(now.processes) > len(self.processes):
            found.append(f"processes: {sorted(now.processes)}")
        if now.descriptors > self.descriptors + 8:
            found.append(f"descriptors: {self.descriptors} became {now.descriptors}")
        if now.resident_bytes > self.resident_bytes + MAX_GROWTH_BYTES:
            found.append(f"memory: {self.resident_bytes // MIB} MiB became {now.resident_bytes // MIB}")
        if now.disk_bytes > self.disk_bytes + MIB:
            found.append(f"disk: {self.disk_bytes} bytes became {now.disk_bytes}")
        return found


def used_bytes(folder: Path) -> int:
    """Bytes in use on the file system of `folder`, which nothing else uses."""
    about = os.statvfs(folder)
    return (about.f_blocks - about.f_bfree) * about.f_frsize


class Oracle:
    """Compares the state with that before any generated program ran."""

    def __init__(self, pool: SandboxPool, canaries: Canaries, folder: Path) -> None:
        self._pool = pool
        self._canaries = canaries
        self._folder = folder
        self.disk_peak = 0

    async def begin(self) -> None:
        """Record the initial state."""
        for _ in range(3):
            await self.census(search=True)
        self._fresh = (await self.census(search=True))[0]
        self._stats = self._pool.stats()
        self._machine = Machine.now(self._folder)

    async def census(self, *, search: bool) -> list[dict[str, object]]:
        """The environment of fresh programs, one per worker. Raises AssertionError if one does not run."""
        private = str(self._pool.report.level) == "namespaces"
        code = CENSUS.replace("{search}", str(search)).replace("{private}", str(private)).replace("{mark}", MARK)
        request = ExecutionRequest(code=code, limits=PATIENT)
        found = await asyncio.gather(*[self._pool.run(request, f"census {n}") for n in range(self._pool.config.slots)])
        for result in found:
            assert result.outcome is Outcome.OK and not result.stderr, f"a census failed: {result}"
        return [ast.literal_eval(result.stdout) for result in found]

    def of_result(self, result: ExecutionResult, request: ExecutionRequest) -> list[str]:
        """Findings in the result of a generated program."""
        found: list[str] = []
        if self._canaries.secret in result.stdout + result.stderr + result.value:
            found.append("a program read the secret")
        if result.outcome is Outcome.INVALID:
            found.append(f"invalid: {result.reason}")
        if result.wall_s > request.limits.wall_s + 10.0:
            found.append(f"ran for {result.wall_s} s, allowed were {request.limits.wall_s}")
        return found

    async def after(self, *, search: bool) -> list[str]:
        """Findings after all programs of a round have ended."""
        found = self._canaries.wrong()
        try:
            for fresh in await self.census(search=search):
                found += [
                    f"residue {name}: {self._fresh[name]} became {fresh[name]}"
                    for name in fresh
                    if fresh[name] != self._fresh[name]
                ]
        except AssertionError as error:
            found.append(str(error))
        self.disk_peak = max(self.disk_peak, used_bytes(self._folder))
        if self.disk_peak > MAX_DISK_BYTES:
            found.append(f"{self.disk_peak} bytes of disk")
        return found + statistics_faults(self._stats, self._pool.stats())

    async def settled(self) -> list[str]:
        """Findings on the machine that remain when no program runs."""
        end = time.monotonic() + QUIET_S
        while True:
            wrong = self._machine.wrong(Machine.now(self._folder))
            if not wrong or time.monotonic() > end:
                return wrong
            await asyncio.sleep(0.2)


def statistics_faults(before: PoolStats, now: PoolStats) -> list[str]:
    """Findings in the statistics of an idle pool."""
    found = [
        f"{name} {getattr(before, name)} became {getattr(now, name)}"
        for name in ("workers_lost", "servers_lost", "retried", "failed", "refused")
        if getattr(now, name) != getattr(before, name)
    ]
    if now.running or now.waiting:
        found.append(f"{now.running} run and {now.waiting} wait though nothing is asked")
    if now.accepted != sum(now.finished.values()) + now.failed:
        found.append(f"{now.accepted} accepted, {sum(now.finished.values())} finished, {now.failed} failed")
    return found
