"""Attacks that got through once, each with what must be found afterwards: `python -m tests.sandbox.attacks LEVEL`.

Run in a separate process, so that it can be run as any user; prints one JSON object: attack to what was wrong.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rstar_ray.outcome import Outcome
from sandbox.jail import cpp_program, system_calls
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest, ExecutionResult
from tests import derived

MIB = 1 << 20
Attack = Callable[[SandboxPool, Path], Awaitable[str]]
ATTACKS: dict[str, Attack] = {}

# Every program begins so; `refused` is True where an attempt raises OSError, and False where it works.
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False
def maps():
    try:
        return list(open("/proc/self/maps"))
    except OSError:
        return felt_maps()
def felt_maps():
    # Without a /proc: near what we know, a page that cannot be mapped is taken, and a shared one can be mapped again.
    for each in (libc.mmap, libc.mremap, libc.munmap): each.restype = ctypes.c_void_p
    failed, page, size, pipe = ctypes.c_void_p(-1).value, 4096, ctypes.c_size_t, os.pipe()
    def free(low, length):  # 0x100022 is PRIVATE, ANONYMOUS and FIXED_NOREPLACE
        found = libc.mmap(ctypes.c_void_p(low), size(length), 0, 0x100022, -1, ctypes.c_long(0))
        if found != failed: libc.munmap(ctypes.c_void_p(found), size(length))
        return found == low
    def taken(low, length):
        if free(low, length): return
        if length == page: yield low
        else:
            for half in (low, low + length // 2): yield from taken(half, length // 2)
    def mode(low):
        if libc.write(pipe[1], ctypes.c_void_p(low), size(1)) != 1: return ""
        if libc.read(pipe[0], ctypes.c_void_p(low), size(1)) != 1:
            os.read(pipe[0], 1)
            return "r--p"
        again = libc.mremap(ctypes.c_void_p(low), size(0), size(page), 1, None)
        if again == failed: return "rw-p"
        libc.munmap(ctypes.c_void_p(again), size(page))
        return "rw-s"
    libc.malloc.restype, reach = ctypes.c_void_p, 1 << 28
    near = {ctypes.cast(libc.pause, ctypes.c_void_p).value, id(object()), libc.malloc(100)}
    places = sorted({(at // reach + beside) * reach for at in near for beside in (-1, 0, 1)})
    felt = []
    for place in places:
        for low in taken(place, reach):
            kind = mode(low)
            if felt and felt[-1][1:] == [low, kind]: felt[-1][1] = low + page
            elif kind: felt.append([low, low + page, kind])
    return [f"{low:x}-{high:x} {kind} 0" for low, high, kind in felt]
def call(number, *arguments):
    found = libc.syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return found
"""


def attack(function: Attack) -> Attack:
    """Enter one attack; it returns what was wrong, nothing where it was contained."""
    ATTACKS[function.__name__] = function
    return function


async def run(pool: SandboxPool, code: str, **more: Any) -> ExecutionResult:
    limits = derived.program(cpu_s=more.pop("cpu_s", 10.0), wall_s=more.pop("wall_s", 30.0))
    return await pool.run(ExecutionRequest(code=PRELUDE + code, limits=limits, **more))


async def expect(pool: SandboxPool, code: str, stdout: str) -> str:
    result = await run(pool, code)
    return (
        "" if result.stdout == stdout else f"{result.outcome} {result.reason} {result.stdout!r} {result.stderr[-300:]}"
    )


@attack
async def a_signal_to_the_process_group_reaches_nobody_else(pool: SandboxPool, _: Path) -> str:
    for _ in range(2):
        await run(pool, "try: os.kill(0, signal.SIGKILL)\nexcept OSError: pass")
        await run(pool, "try: os.killpg(os.getpgrp(), signal.SIGKILL)\nexcept OSError: pass")
    if wrong := await expect(pool, "print(os.getpgrp() != 0)", "True\n"):
        return wrong
    stats = pool.stats()
    return f"lost {stats}" if stats.workers_lost or stats.servers_lost or stats.retried else ""


@attack
async def files_of_the_server_keep_their_metadata(pool: SandboxPool, home: Path) -> str:
    canary = home / "canary"
    canary.write_text("x" * 1000)
    canary.chmod(0o600)
    os.utime(canary, (1e9, 1e9))
    places = [str(canary), str(home), os.path.dirname(os.__file__), os.__file__]  # noqa: PTH120
    before = [(os.stat(place).st_mode, os.stat(place).st_mtime, os.stat(place).st_size) for place in places]  # noqa: PTH116
    code = f"""
import glob
for place in {places!r} + glob.glob("/tmp/sandbox-*") + glob.glob("/tmp/sandbox-*/*"):
    if place.startswith(os.getcwd()):
        continue
    for attempt in (
        lambda: os.chmod(place, 0o777), lambda: os.chown(place, os.getuid(), os.getgid()), lambda: os.utime(place),
        lambda: os.utime(place, (5, 5)), lambda: os.truncate(place, 1), lambda: os.chmod(place, 0),
        lambda: os.close(os.open(place, os.O_RDONLY | os.O_TRUNC)), lambda: os.close(os.open(place, 3 | os.O_TRUNC)),
        lambda: os.fchmod(os.open(place, os.O_RDONLY), 0o777), lambda: os.utime(os.open(place, os.O_RDONLY), (5, 5)),
        lambda: os.setxattr(place, "user.x", b"y"), lambda: os.rename(place, place + "x"), lambda: os.unlink(place),
    ):
        try: attempt()
        except OSError: pass
print("done")
"""
    wrong = await expect(pool, code, "done\n")
    after = [(os.stat(place).st_mode, os.stat(place).st_mtime, os.stat(place).st_size) for place in places]  # noqa: PTH116
    return wrong or ("" if before == after else f"{before} became {after}")


@attack
async def no_network_is_reached(pool: SandboxPool, _: Path) -> str:
    """Somebody listens on this machine, in TCP, UDP and under an abstract name; nobody calls."""
    name = f"\0nobody-calls-{os.getpid()}"
    listening = [socket.socket(), socket.socket(type=socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)]
    try:
        for one, place in zip(listening, (("127.0.0.1", 0), ("127.0.0.1", 0), name), strict=True):
            one.bind(place)
            one.setblocking(False)
        listening[0].listen()
        listening[2].listen()
        code = f"""
for family, kind, place in (
    (socket.AF_INET, socket.SOCK_STREAM, {listening[0].getsockname()!r}),
    (socket.AF_INET, socket.SOCK_DGRAM, {listening[1].getsockname()!r}),
    (socket.AF_UNIX, socket.SOCK_STREAM, {name!r}),
):
    def call_there():
        with socket.socket(family, kind) as one: one.connect(place); one.send(b"x")
    print(refused(call_there))
one, other = socket.socketpair()
print(refused(one.connect, {name!r}), refused(one.sendto, b"x", {name!r}), refused(one.bind, "here"))
for family in range(46):
    for kind in (1, 2, 3, 5): assert refused(socket.socket, family, kind), (family, kind)
"""
        if wrong := await expect(pool, code, "True\n" * 3 + "True True True\n"):
            return wrong
        for one, hear in zip(listening, ("accept", "recv", "accept"), strict=True):
            try:
                getattr(one, hear)(*([10] if hear == "recv" else []))
            except BlockingIOError:
                continue
            return f"{one} was called"
        return ""
    finally:
        for one in listening:
            one.close()


@attack
async def nothing_is_left_in_shared_memory(pool: SandboxPool, _: Path) -> str:
    places = """
for line in maps():
    place, mode, *rest = line.split()
    low, high = (int(end, 16) for end in place.split("-"))
    if "s" in mode and "w" in mode:
"""
    left = places + "        ctypes.memset(low, 0x5A, high - low)"
    found = places + "        print('FOUND') if ctypes.string_at(low, high - low).count(0x5A) > 1000 else None"
    await run(pool, left)
    return await expect(pool, found + "\nprint('searched')", "searched\n")


@attack
async def no_name_of_a_file_is_left_in_memory(pool: SandboxPool, _: Path) -> str:
    await run(pool, "for number in range(300): open(f'LEFT-BEHIND-{number:04}', 'w').close()")
    code = r"""
import re
found = 0
for line in maps():
    place, mode, *rest = line.split()
    low, high = (int(end, 16) for end in place.split("-"))
    if mode.startswith("rw") and "[v" not in line:
        found += len(re.findall(rb"LEFT[-]BEHIND[-][0-9]+", ctypes.string_at(low, high - low)))
print(found, os.listdir("."))
"""
    return await expect(pool, code, "0 []\n")


@attack
async def a_descriptor_in_flight_keeps_no_room(pool: SandboxPool, _: Path) -> str:
    code = """
file = os.open("big", os.O_RDWR | os.O_CREAT)
os.write(file, bytes(40 << 20))
one, other = socket.socketpair()
print(refused(socket.send_fds, one, [b"x"], [file]), refused(socket.send_fds, other, [b"x"], [one.fileno()]))
"""
    if wrong := await expect(pool, code, "True True\n"):
        return wrong
    return await expect(pool, "print(open('big', 'wb').write(bytes(40 << 20)))", f"{40 * MIB}\n")


@attack
async def the_folder_tells_nothing_of_the_program_before(pool: SandboxPool, _: Path) -> str:
    """A worker made while the first program runs may have its folder from the same tick of the clock: by chance,
    so not each time, as a folder that is handed on would."""
    show = "print(os.stat('.').st_mtime_ns, os.stat('.').st_ctime_ns)"
    for _ in range(8):
        first = await run(pool, "time.sleep(0.03)\nopen('x', 'w').close()\n" + show)
        second = await run(pool, show)
        if first.stdout and second.stdout and not set(first.stdout.split()) & set(second.stdout.split()):
            return ""
    return f"{first.stdout} {first.stderr} again {second.stdout} {second.stderr}"


@attack
async def nobody_is_notified_leased_or_locked_out(pool: SandboxPool, _: Path) -> str:
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    mine = modules[os.getpid() % len(modules)]  # others run this attack at the same time
    wrong = await expect(
        pool,
        f"""
place = {str(mine)!r}
library = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
file = os.open(place, os.O_RDONLY)
print(refused(fcntl.fcntl, library, 1026, 0x8000003F), refused(fcntl.fcntl, file, 1024, 0),
      refused(fcntl.fcntl, file, 8, os.getpid()), refused(fcntl.fcntl, os.pipe()[0], 1031, 1 << 20))
fcntl.flock(file, fcntl.LOCK_EX)
sys.stdout.flush()
time.sleep(0.5)
""",
        "True True True True\n",
    )
    if wrong:
        return wrong
    locker = asyncio.ensure_future(
        run(pool, f"fcntl.flock(os.open({str(mine)!r}, os.O_RDONLY), fcntl.LOCK_EX)\ntime.sleep(0.5)")
    )
    await asyncio.sleep(0.25)
    with open(mine, "rb") as file:  # noqa: PTH123
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "the host is locked out"
        finally:
            await locker
    return ""


@attack
async def the_page_cache_answers_no_questions(pool: SandboxPool, _: Path) -> str:
    code = """
file = os.open(os.__file__, os.O_RDONLY)
print(refused(os.preadv, file, [bytearray(10)], 0, os.RWF_NOWAIT))
reading, writing = os.pipe()
os.posix_fadvise(reading, 0, 0, os.POSIX_FADV_DONTNEED)  # of a pipe it would fail, were it done
if os.uname().machine == "x86_64":
    memory = mmap.mmap(file, 4096, prot=mmap.PROT_READ)
    print(refused(call, 27, ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(bytearray(4096)))), 4096, None))
else:
    print(True)
print(refused(mmap.mmap(-1, 1 << 20).madvise, 21))
"""
    return await expect(pool, code, "True\nTrue\nTrue\n")


@attack
async def nothing_is_written_to_disk_on_demand(pool: SandboxPool, _: Path) -> str:
    code = """
reading, writing = os.pipe()  # of a pipe it would fail, were it done
os.fsync(writing); os.fdatasync(writing)
print("synced")
"""
    return await expect(pool, code, "synced\n")


@attack
async def devices_keep_their_times(pool: SandboxPool, _: Path) -> str:
    before = [os.stat(f"/dev/{name}") for name in ("full", "null", "zero")]  # noqa: PTH116
    code = """
for name in ("full", "null", "zero"):
    refused(os.utime, "/dev/" + name); refused(os.utime, "/dev/" + name, (5, 5)); refused(os.chmod, "/dev/" + name, 0)
print(open("/dev/null", "w").write("x"), len(open("/dev/zero", "rb").read(3)))
"""
    wrong = await expect(pool, code, "1 3\n")
    after = [os.stat(f"/dev/{name}") for name in ("full", "null", "zero")]  # noqa: PTH116
    changed = [
        (a.st_mtime, a.st_mode) != (b.st_mtime, b.st_mode) and b.st_mtime < 10
        for a, b in zip(before, after, strict=True)
    ]
    return wrong or ("a device has another time" if any(changed) else "")


@attack
async def files_that_nobody_sees_take_little_of_the_disk(pool: SandboxPool, _: Path) -> str:
    code = """
held = []
for number in range(40):
    try:
        file = os.open(f"f{number}", os.O_RDWR | os.O_CREAT)
        os.unlink(f"f{number}")
        os.posix_fallocate(file, 0, 60 << 20)
    except OSError:
        continue
    finally:
        held.append(file)
try: held.append(os.open(".", os.O_RDWR | os.O_TMPFILE))
except OSError: pass
print(sum(os.fstat(file).st_blocks * 512 for file in held if os.fstat(file).st_nlink == 0) <= 64 << 20)
"""
    result = await run(pool, code)
    fine = result.stdout == "True\n" or result.outcome is Outcome.OUT_OF_MEMORY
    return "" if fine else f"{result.outcome} {result.stdout} {result.stderr[-300:]}"


@attack
async def threads_are_few_or_few_for_long(pool: SandboxPool, _: Path) -> str:
    code = """
threading.stack_size(32768)
number = 0
try:
    for number in range(3000):
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
except RuntimeError:
    print(number <= 64)
    os._exit(0)
time.sleep(20)
"""
    result = await run(pool, code)
    fine = result.stdout == "True\n" or (result.reason == "started too many threads" and result.wall_s < 10)
    return "" if fine else f"{result.outcome} {result.reason} {result.stdout} {result.stderr[-300:]}"


@attack
async def no_core_is_dumped_and_nobody_becomes_dumpable(pool: SandboxPool, _: Path) -> str:
    code = """
print(resource.getrlimit(resource.RLIMIT_CORE)[1] == 1, libc.prctl(4, 1, 0, 0, 0), libc.prctl(3, 0, 0, 0, 0))
"""
    return await expect(pool, code, "True -1 0\n")


@attack
async def pipes_and_pairs_hold_little(pool: SandboxPool, _: Path) -> str:
    code = """
held = []
try:
    while True: held.append(socket.socketpair())
except OSError as error: pass
print(len(held) <= 32)
"""
    return await expect(pool, code, "True\n")


@attack
async def huge_pages_and_nameless_memory_are_refused(pool: SandboxPool, _: Path) -> str:
    return await expect(
        pool,
        "print(refused(mmap.mmap, -1, 2 << 20, mmap.MAP_PRIVATE | 0x40020), refused(os.memfd_create, 'x'))",
        "True True\n",
    )


@attack
async def nothing_is_learnt_of_other_processes(pool: SandboxPool, _: Path) -> str:
    """Of their clocks, priorities and groups; whether a word that names one as the owner of a lock is believed."""
    others = [os.getpid(), os.getppid()]
    code = f"""
def lock_of(pid):
    word, soon = ctypes.c_uint32(pid), (ctypes.c_long * 2)(int(time.time()), 0)
    try: call(202 if os.uname().machine == "x86_64" else 98, ctypes.byref(word), 6, 0, ctypes.byref(soon), None, 0)
    except OSError as error:
        if error.errno == errno.ENOSYS: raise
def timer_of(pid):
    if libc.timer_create((~pid << 3) | 2, None, ctypes.byref(ctypes.c_void_p())): raise OSError
for pid in {others!r} + [os.getppid()]:
    for look in (
        os.sched_getaffinity, os.getpgid, os.getsid, lambda p: os.kill(p, 0) if p != os.getppid() else 1 / 0,
        lock_of, timer_of,
        lambda p: time.clock_gettime((~p << 3) | 2), lambda p: time.clock_getres((~p << 3) | 2),
        lambda p: os.getpriority(os.PRIO_PROCESS, p), lambda p: os.getpriority(os.PRIO_PGRP, p),
    ):
        try: look(pid)
        except (OSError, ZeroDivisionError): continue
        print("saw", pid)
for uid in (0, 1, {os.getuid()}):
    print("saw the user", uid) if not refused(os.getpriority, os.PRIO_USER, uid) else None
print("done", os.getpriority(os.PRIO_PROCESS, 0) >= 0, time.thread_time() > 0)
"""
    return await expect(pool, code, "done True True\n")


@attack
async def nothing_is_learnt_of_the_container(pool: SandboxPool, _: Path) -> str:
    """What the control groups are called that we run in."""
    code = """
try: lines = open("/proc/self/cgroup").read().split()
except OSError: lines = []
print([line for line in lines if line.split(":", 2)[2] != "/"])
"""
    joins = not str(pool.report.facts["cgroup"]).startswith("none")
    return "" if joins else await expect(pool, code, "[]\n")


@attack
async def no_word_written_about_a_file_is_read(pool: SandboxPool, home: Path) -> str:
    place = home / "described"
    place.write_text("x")
    place.chmod(0o600)
    with contextlib.suppress(OSError):  # some file systems keep none
        os.setxattr(place, "user.note", b"hunter2")
    code = f"""
for look in (os.listxattr, lambda path: os.getxattr(path, "user.note")):
    for follow in (True, False):
        print(refused(look, {str(place)!r}))
import shutil
open("a", "w").close()
print(shutil.copyfile("a", "b"))
"""
    return await expect(pool, code, "True\nTrue\n" * 2 + "b\n")


@attack
async def a_thread_has_no_private_descriptors(pool: SandboxPool, _: Path) -> str:
    """They are counted by table, so that sixty threads would hold sixty times as much in pipes and pairs."""
    code = """
stack = mmap.mmap(-1, 1 << 16)
top = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 16) - 64)
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
SHARES_ALL_BUT_FILES = 0x100 | 0x200 | 0x800 | 0x10000
print(libc.clone(pause, top, SHARES_ALL_BUT_FILES, None))
sys.stdout.flush()
os._exit(0)
"""
    return await expect(pool, code, "-1\n")


@attack
async def no_file_lends_its_uid_to_others(pool: SandboxPool, _: Path) -> str:
    if pool.report.level == "namespaces":
        return ""  # nobody else sees its files
    code = """
open("x", "w").close()
ways = [lambda: os.chmod("x", 0o4777), lambda: os.chmod("x", 0o2777), lambda: os.fchmod(os.open("x", 0), 0o6777),
        lambda: os.open("y", os.O_CREAT | os.O_WRONLY, 0o4777), lambda: os.open("z", os.O_CREAT | os.O_RDONLY, 0o2777),
        lambda: os.mkdir("d", 0o6777)]
for way in ways: refused(way)
print([name for name in os.listdir() if os.stat(name).st_mode & 0o6000])
"""
    return await expect(pool, code, "[]\n")


@attack
async def what_is_on_no_list_is_refused(pool: SandboxPool, _: Path) -> str:
    """Every number up to 600 that the table does not have, and 32-bit system calls."""
    listed = sorted(set(system_calls.numbers().values()))
    code = f"""
passed = []
for number in sorted(set(range(600)) - set({listed!r}) - {{335, 336}}):  # of uprobes, which pass by every filter
    try: call(number, 0, 0, 0, 0, 0, 0)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS): continue
    passed.append(number)
print(passed)
"""
    if wrong := await expect(pool, code, "[]\n"):
        return wrong
    if platform.machine() != "x86_64":
        return ""
    code_32 = """
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes.fromhex("b814000000cd80c3"))  # getpid by int 0x80
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
    result = await run(pool, code_32)
    return "" if result.reason == "ended by SIGSYS" else f"{result.outcome} {result.reason} {result.stdout}"


@attack
async def a_deadline_holds_though_the_first_thread_has_ended(pool: SandboxPool, _: Path) -> str:
    code = """
def spin():
    while True: pass
threading.Thread(target=spin).start()
call(60 if os.uname().machine == "x86_64" else 93, 0)
"""
    result = await run(pool, code, cpu_s=0.3, wall_s=20.0)
    return "" if result.outcome is Outcome.TIMEOUT and result.wall_s < 15 else f"{result.outcome} {result.wall_s}"


@attack
async def a_tree_of_processes_has_one_core(pool: SandboxPool, _: Path) -> str:
    if pool.report.level != "namespaces" or cpp_program.compiler() is None:
        return ""
    source = "#include <unistd.h>\nint main(){for(int i=0;i<8;i++) if(!fork()) for(;;); for(;;) pause();}"
    limits = derived.program(cpu_s=1.5, wall_s=2.0)
    result = await pool.run(ExecutionRequest(code=source, language="cpp", limits=limits))
    fine = result.outcome is Outcome.TIMEOUT and result.cpu_s < 2.5
    return "" if fine else f"{result.outcome} {result.cpu_s} {result.stderr[-200:]}"


@attack
async def honest_programs_find_what_they_need(pool: SandboxPool, _: Path) -> str:
    code = """
import asyncio, sqlite3, tempfile, threading, concurrent.futures
async def both(): return await asyncio.gather(asyncio.sleep(0, 1), asyncio.to_thread(lambda: 2))
print(asyncio.run(both()))
base = sqlite3.connect("base.db")
base.execute("create table t(a)"); base.execute("insert into t values (7)"); base.commit()
print(base.execute("select a from t").fetchall())
with open("f", "w") as file: file.write("text"); file.flush(); os.fsync(file.fileno())
print(open("f").read(), list(concurrent.futures.ThreadPoolExecutor(4).map(abs, [-1, 2])))
"""
    if pool.report.level == "landlock":
        code = code.replace('"base.db"', '":memory:"')  # a journal is removed, and files stay here
    return await expect(pool, code, "[1, 2]\n[(7,)]\ntext [1, 2]\n")


async def main(level: str) -> dict[str, str]:
    """Run every attack, one after another, and an honest program after each."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        async with derived.pool(only=level, slots=1, warm=("lean",)) as pool:
            for name, made in ATTACKS.items():
                started = time.monotonic()
                wrong = await made(pool, Path(place))
                after = await pool.run(ExecutionRequest(code="print(sum(range(10)))"))
                if not wrong and after.stdout != "45\n":
                    wrong = f"the next program: {after}"
                found[name] = wrong
                print(f"{name}: {time.monotonic() - started:.1f} s {wrong}", file=sys.stderr)
            stats = pool.stats()
            found["no_worker_was_lost"] = (
                "" if not stats.workers_lost + stats.servers_lost + stats.failed else str(stats)
            )
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
