"""Generates programs: the same seed and number give the same program on every machine with the same system calls.

Three kinds: system calls with random arguments, random sequences of statements that were harmful in the past, and the
hostile cases of tests/sandbox with lines and numbers changed. `namespaces` has a fourth, C++ with processes.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from sandbox.jail import system_calls
from sandbox.request import ExecutionRequest
from tests import derived

CASES = Path(__file__).parent.parent / "sandbox" / "data" / "sandbox_cases.json"
MIB = 1 << 20
MARK = "FUZZ-MARK"  # is in every program; no later program may find it
NUMBERS = sorted(system_calls.numbers().values())
LAST_NUMBER = 480
KINDS = ("calls", "primitives", "mutated", "cpp")
WEIGHTS = (45, 35, 18, 2)

INTERESTING = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 21, 42, 63, 64, 100, 255, 256, 512, 1024, 1026, 1030, 1031, 4095, 4096),
    *(0o100, 0o644, 0o777, 0x200, 0x241, 0x8000, 0x10000, 0x40000, 0x80000, 0x100000, 0x400000, 0x410002, 1 << 20),
    *(64 << 20, 1 << 30, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, 1 << 40, (1 << 63) - 1),
    *(-1, -2, -9, -100, -4096, -(1 << 31), -(1 << 63)),
)
WITHIN = ("", ".", "..", "a", "b", "a/b", "a/../../..", "\xff\x01", "x" * 255, "x" * 4000)
ELSEWHERE = (
    *("/", "/tmp", "/home/tool", "/usr", "/usr/bin/env", "/etc/passwd", "/etc/shadow", "/root", "/dev/null"),
    *("/dev/full", "/dev/shm", "/dev/mem", "/dev/kmsg", "/dev/ptmx", "/proc/1/mem", "/proc/1/root", "/proc/self/exe"),
    *("/proc/self/mem", "/proc/self/fd/1", "/proc/self/oom_score_adj", "/proc/self/uid_map", "/proc/self/ns/mnt"),
    *("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/fs/cgroup", "/sys/kernel", "/run", "/var/tmp"),
)

PRELUDE = """\
import ctypes, os, signal, threading, time
mark = "{mark}"
libc = ctypes.CDLL(None, use_errno=True)
"""
CALLS = """\
blank = ctypes.create_string_buffer({blank!r} + b"/" + bytes(65536))
places = [ctypes.create_string_buffer(place.encode("utf-8", "surrogateescape"), 4200) for place in {places!r}]
def argument(given):
    if isinstance(given, int):
        return ctypes.c_long(given)
    kind, number = given
    if kind == "pid":
        return ctypes.c_long((os.getpid(), os.getppid(), threading.get_native_id(), -os.getpid())[number])
    return places[number] if kind == "place" else ctypes.byref(blank, number)
def make(table):
    for number, *given in table:
        libc.syscall(ctypes.c_long(number), *map(argument, given))
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
table = {table!r}
"""
IN_THREADS = """\
for part in (table[::2], table[1::2]):
    threading.Thread(target=make, args=(part,), daemon=True).start()
time.sleep(0.1)
"""

# Each runs alone, in any order; `{n}` is a number and `{place}` a fresh path.
PRIMITIVES = (
    "os.kill({n}, signal.SIGSTOP)",
    "os.kill(0, {signal})",
    "os.kill(-1, {signal})",
    "os.kill(os.getppid(), {signal})",
    "os.killpg(os.getpgrp(), {signal})",
    "signal.signal({signal}, signal.SIG_IGN)",
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "signal.setitimer({n} % 3, 0.001, 0.001)",
    "libc.timer_create({n} % 12, None, ctypes.byref(ctypes.c_long()))",
    "os.chmod({place!r}, {n} & 0o7777)",
    "os.chown({place!r}, os.getuid(), os.getgid())",
    "os.utime({place!r}, ({n}, 5))",
    "os.truncate({place!r}, abs({n}) % 4096)",
    "os.setxattr({place!r}, 'user.x', b'y')",
    "os.rename({place!r}, 'taken')",
    "os.link({place!r}, 'linked')",
    "os.symlink({place!r}, 'link{n}')",
    "os.unlink({place!r})",
    "os.mkdir({place!r} + '/made')",
    "open({place!r}, 'w').write(mark)",
    "print(open({place!r}, errors='replace').read(2000))",
    "print(os.listdir({place!r}))",
    "print(os.readlink({place!r}))",
    "os.chdir({place!r})",
    "os.chroot({place!r})",
    "held = [open(f'f{{i}}', 'wb') for i in range(abs({n}) % 300)]",
    "[open(f'{{mark}}-{{i}}', 'w').close() for i in range(abs({n}) % 600)]",
    "open('big', 'wb').write(mark.encode() * (abs({n}) % 3000000))",
    "f = open('gone', 'wb'); os.unlink('gone'); os.posix_fallocate(f.fileno(), 0, abs({n}) % (70 << 20))",
    "os.truncate('big', abs({n}))",
    "[(os.mkdir('d'), os.chdir('d')) for _ in range(abs({n}) % 200)]",
    "os.mkdir('closed'); os.chmod('closed', 0)",
    "os.chmod('.', {n} & 0o777)",
    "os.open('.', os.O_RDWR | os.O_TMPFILE)",
    "os.mkfifo('fifo'); os.open('fifo', os.O_RDWR)",
    "os.mknod('node', 0o60666, os.makedev(254, 0))",
    "m = __import__('mmap').mmap(-1, 1 + abs({n}) % (64 << 20)); m[:len(mark)] = mark.encode()",
    "m = __import__('mmap').mmap(os.open({place!r}, 0), 4096, prot=1)",
    "m.madvise({n} % 120)",
    "[ctypes.memset(int(l.split('-')[0], 16), 0x5A, 4096) for l in open('/proc/self/maps') if 'rw-s' in l]",
    "[ctypes.memset(int(l.split('-')[0], 16), 0x5A, 64) for l in open('/proc/self/maps') if 'rw-p' in l][:{n} % 9]",
    "import fcntl; fcntl.fcntl(os.open({place!r}, 0), 1026, 0x8000003F)",
    "import fcntl; fcntl.fcntl({n} % 9, {m}, {n})",
    "import fcntl; fcntl.ioctl({n} % 9, {m}, bytearray(64))",
    "import fcntl; fcntl.flock(os.open({place!r}, 0), 2)",
    "os.preadv(os.open({place!r}, 0), [bytearray(10)], 0, {n} & 0x3F)",
    "os.posix_fadvise(os.open({place!r}, 0), 0, 0, {n} % 8)",
    "os.fsync(os.open({place!r}, 0))",
    "os.sendfile(1, os.open({place!r}, 0), 0, 100)",
    "os.splice(0, 1, 100)",
    "os.copy_file_range(os.open({place!r}, 0), 1, 100)",
    "[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(abs({n}) % 99)]",
    "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()",
    "import _thread; [_thread.start_new_thread(os._exit, (0,)) for _ in range(3)]",
    "import socket; s = [socket.socketpair() for _ in range(abs({n}) % 40)]; s[0][0].send(mark.encode() * 9000)",
    "import socket; a, b = socket.socketpair(); [socket.send_fds(a, [b'x'], [f]) for f in (b.fileno(), 1)]",
    "import socket; socket.socket({n} % 40, 1 + {m} % 5)",
    "p = [os.pipe2(os.O_NONBLOCK) for _ in range(abs({n}) % 40)]; [os.write(w, bytes(99999)) for _, w in p]",
    "os.dup2({n} % 9, {m} % 300)",
    "os.closerange({n} % 5, 256)",
    "os.write({n} % 9, mark.encode() * (abs({m}) % 9000))",
    "os.read(0, 99)",
    "os.umask({n} & 0o777)",
    "os.nice({n} % 20)",
    "os.sched_setaffinity(0, {{0}})",
    "os.sched_setscheduler({n} % 3, 0, os.sched_param(0))",
    "os.setpgid(0, 0)",
    "os.setsid()",
    "os.setuid({n} % 3)",
    "__import__('resource').setrlimit(abs({n}) % 16, (abs({m}), abs({m})))",
    "__import__('resource').prlimit(os.getppid(), abs({n}) % 16, (1, 1))",
    "libc.prctl({n} % 80, {m}, 0, 0, 0)",
    "libc.personality({n})",
    "libc.unshare(0x{bits:x})",
    "libc.setns(os.open('/proc/self/ns/mnt', 0), 0)",
    "libc.mount(b'none', b'/', b'tmpfs', {n} & 0xFFFF, None)",
    "libc.umount2({place!r}.encode(), {n} & 15)",
    "libc.ptrace({n} % 20, os.getppid(), 0, 0)",
    "libc.shmget({n}, 4096, 0o1666)",
    "libc.mq_open(b'/x', 66, 0o666, None)",
    "os.memfd_create('x')",
    "os.eventfd({n} % 9)",
    "os.fork() or time.sleep(5)",
    "os.execv('/bin/sh', ['sh', '-c', 'sleep 5'])",
    "import subprocess; subprocess.Popen(['sleep', '5'])",
    "import sys; sys.modules.clear()",
    "import sys; sys.setrecursionlimit(10 ** 9); (f := lambda: f()) and f()",
    "import sys; sys.stdout.close()",
    "import sys; sys.settrace(lambda *_: 1 / 0)",
    "import gc; [o.clear() for o in gc.get_objects() if isinstance(o, list)][:0]",
    "import gc; [o.clear() for o in gc.get_objects() if type(o) is dict][:0]",
    "import builtins; builtins.__dict__.clear()",
    "import atexit; atexit.register(time.sleep, 5)",
    "import atexit; atexit.register(lambda: 1 / 0)",
    "os.environ.clear(); os.putenv('MARK', mark)",
    "a = bytearray(abs({n}) % (300 << 20))",
    "print(mark * (abs({n}) % 100000))",
    "os.write(2, os.urandom(abs({n}) % 100000))",
    "ctypes.string_at({n})",
    "ctypes.memset(id(None), 0, 8)",
    "libc.abort()",
    "os._exit({n} & 255)",
    "raise SystemExit(mark)",
    "raise MemoryError(mark)",
    "while True: pass",
    "time.sleep({n} % 2)",
)

TRY = """\
try:
    exec({line!r})
except BaseException as error:
    if {stops}: raise
"""

CPP = r"""
#include <sys/syscall.h>
#include <unistd.h>
#include <signal.h>
#include <stdlib.h>
static char blank[65536] = "{mark}";
static const char *places[] = {{{places}}};
static long table[][7] = {{{table}}};
static char kinds[][7] = {{{kinds}}};
int main() {{
    alarm(1);
    for (int round = 0; round < {rounds}; round++) {{
        if (fork() < 0) break;
        for (unsigned i = 0; i < sizeof table / sizeof *table; i++) {{
            long a[7];
            for (int j = 0; j < 7; j++) {{
                long v = table[i][j];
                a[j] = kinds[i][j] == 1 ? (long)places[v] : kinds[i][j] == 2 ? (long)(blank + v)
                     : kinds[i][j] == 3 ? (v == 1 ? getppid() : v == 3 ? -getpid() : getpid()) : v;
            }}
            syscall(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
        }}
    }}
    return 0;
}}
"""

Given = int | tuple[str, int]


@dataclass(frozen=True, slots=True)
class Made:
    """One generated program."""

    name: str  # seed/number kind
    request: ExecutionRequest


def made(seed: int, number: int, level: str, places: tuple[str, ...] = ()) -> Made:
    """Program `number` of a seed; it tries `places`, paths that it must not reach."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choices(KINDS, WEIGHTS)[0]
    if kind == "cpp" and level != "namespaces":
        kind = "calls"
    mark = f"{MARK}-{number}-"
    known = (*WITHIN, *ELSEWHERE, *places, *places, *places)
    write = {"calls": _calls, "primitives": _primitives, "mutated": _mutated, "cpp": _cpp}[kind]
    code = write(draw, mark, known)
    processes = kind == "cpp"
    limits = derived.program(
        cpu_s=draw.choice((0.2, 0.5)) + 2.0 * processes,
        wall_s=draw.choice((0.5, 1.0)) + 4.0 * processes,
        memory_bytes=draw.choice((32, 128, 384)) * MIB,
        output_bytes=draw.choice((4096, MIB)),
    )
    request = ExecutionRequest(
        code=code,
        stdin=draw.choice(("", mark, mark * 5000)),
        limits=limits,
        language="cpp" if processes else "python",
        seed=draw.choice((None, 3)),
    )
    return Made(f"{seed}/{number} {kind}", request)


def _table(draw: random.Random, known: tuple[str, ...], *, length: int) -> list[tuple[Given, ...]]:
    return [_call(draw, known) for _ in range(length)]


def _call(draw: random.Random, known: tuple[str, ...]) -> tuple[Given, ...]:
    sort = draw.random()
    if sort < 0.75:
        number = draw.choice(NUMBERS)
    elif sort < 0.97:
        number = draw.randrange(LAST_NUMBER)
    else:
        number = draw.choice((0x40000000 | draw.randrange(512), -1, 1 << 31, 1 << 40, 5000))
    return number, *[_given(draw, known) for _ in range(6)]


def _given(draw: random.Random, known: tuple[str, ...]) -> Given:
    sort = draw.random()
    if sort < 0.3:
        return draw.choice(INTERESTING)
    if sort < 0.5:
        return draw.randrange(12)  # probably a descriptor
    if sort < 0.7:
        return "place", draw.randrange(len(known))
    if sort < 0.85:
        return "blank", draw.choice((0, 8, 64, 1000, 4096, 65000))
    if sort < 0.92:
        return "pid", draw.randrange(4)
    return draw.getrandbits(draw.choice((8, 16, 32, 62)))


def _calls(draw: random.Random, mark: str, known: tuple[str, ...]) -> str:
    table = _table(draw, known, length=draw.randrange(5, 60))
    text = CALLS.format(blank=draw.randbytes(draw.randrange(256)), places=list(known), table=table)
    return PRELUDE.format(mark=mark) + text + (IN_THREADS if draw.random() < 0.2 else "make(table)\n")


def _primitives(draw: random.Random, mark: str, known: tuple[str, ...]) -> str:
    lines = [_primitive(draw, known) for _ in range(draw.randrange(1, 12))]
    stops = "isinstance(error, SystemExit)"
    return PRELUDE.format(mark=mark) + "".join(TRY.format(line=line, stops=stops) for line in lines)


def _primitive(draw: random.Random, known: tuple[str, ...]) -> str:
    return draw.choice(PRIMITIVES).format(
        n=draw.choice((*INTERESTING, draw.getrandbits(20))),
        m=draw.choice((*INTERESTING, draw.getrandbits(16))),
        signal=draw.randrange(1, 65),
        bits=draw.choice((0x10000000, 0x20000, 0x7E020080, draw.getrandbits(31))),
        place=draw.choice(known),
    )


def _mutated(draw: random.Random, mark: str, known: tuple[str, ...]) -> str:
    cases = [case["code"] for case in json.loads(CASES.read_text("utf-8")) if case.get("code")]
    lines = [line for case in draw.sample(cases, draw.randrange(1, 4)) for line in case.splitlines()]
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(lines))
        change = draw.randrange(5)
        if change == 0:
            lines.insert(at, lines[at])
        elif change == 1 and len(lines) > 1:
            del lines[at]
        elif change == 2:
            lines.insert(at, _primitive(draw, known))
        elif change == 3:
            lines[at] = re.sub(r"\b\d+\b", lambda _: str(draw.choice(INTERESTING)), lines[at], count=1)
        else:
            other = draw.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
    return PRELUDE.format(mark=mark) + "\n".join(lines) + "\n"


def _cpp(draw: random.Random, mark: str, known: tuple[str, ...]) -> str:
    table = _table(draw, known, length=draw.randrange(3, 30))
    sorts = {"place": 1, "blank": 2, "pid": 3}
    rows = [", ".join(str(given if isinstance(given, int) else given[1]) + "L" for given in row) for row in table]
    kinds = [", ".join(str(0 if isinstance(given, int) else sorts[given[0]]) for given in row) for row in table]
    return CPP.format(
        mark=mark,
        places=", ".join(json.dumps(place.encode("ascii", "ignore").decode()) for place in known),
        table=", ".join("{" + row.replace(str(-(1 << 63)) + "L", "(-0x7fffffffffffffffL - 1)") + "}" for row in rows),
        kinds=", ".join("{" + row + "}" for row in kinds),
        rounds=draw.randrange(1, 6),
    )
