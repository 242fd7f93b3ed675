"""Seccomp filters in classic BPF, written by hand and installed through prctl(2).

Two filters stack. The *base* filter is installed once per worker: the allow-list of sandbox/jail/system_calls.py. All
other calls fail with EPERM (ENOSYS for newer calls, so that libc falls back). The *program* filter is installed in
every child: it removes calls that only the worker needs, or that this level cannot contain. A program can neither add
nor remove a filter.
"""

import ctypes
import errno
import os
import platform
from typing import NamedTuple

from sandbox.jail import kernel, system_calls

# Calls up to this number that are not in the table fail with EPERM, later ones with ENOSYS.
_LAST_KNOWN = 462
_X32_BIT = 0x40000000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LD_W_ABS, _JEQ, _JGE, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH = 0, 4

_CLONE_FILES, _CLONE_THREAD = 0x00000400, 0x00010000
_CLONE_NEW_ANY = 0x7E020080
_AF_UNIX, _AF_INET, _SOCK_STREAM, _SOCK_DGRAM, _SOCK_TYPE_MASK = 1, 2, 1, 2, 0xF
_SOCKET_LEVELS = (0, 1, 6)  # IPPROTO_IP, SOL_SOCKET, IPPROTO_TCP
_MAP_HUGETLB = 0x40000
_ACCESS_AND_TRUNCATE, _TRUNCATE, _READ_AND_WRITE, _NAMELESS = 0x203, 0x200, 0x3, 0x400000
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: all that files and pipes need.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_SET_PDEATHSIG and PR_SET_SECCOMP (not for programs), PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA.
_PRCTLS = (1, 22, 3, 15, 16, 0x53564D41)
_WORKER_PRCTLS = (1, 22)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ.
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
_CPU_CLOCK = 0x80000000  # the sign bit of a clock's number
_PRIO_PROCESS = 0
_FUTEX_COMMAND = 0x7F  # of its operation, without PRIVATE and CLOCK_REALTIME
_FUTEX_LENDS = (6, 7, 8, 11, 12, 13)  # LOCK_PI, UNLOCK_PI, TRYLOCK_PI, WAIT_REQUEUE_PI, CMP_REQUEUE_PI, LOCK_PI2
_CREATE, _SET_ID = 0o100, 0o6000
_LOCKS = (5, 6, 7, 36, 37, 38)  # F_GETLK, F_SETLK, F_SETLKW and the F_OFD_ kinds
# Hints about its own pages up to MADV_POPULATE_WRITE: not COLD and PAGEOUT (20, 21), MERGEABLE (12), HWPOISON (100).
_MADVISE = (0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23)
_MEMBARRIERS = (0, 8, 16, 32, 64)  # QUERY, and the PRIVATE kinds

Instruction = tuple[int, int, int, int]


class _SockFilter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class Filter:
    """A BPF program in memory, ready to be installed in this process."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self._code = (_SockFilter * len(instructions))(*instructions)
        self._program = _SockFprog(len(instructions), ctypes.addressof(self._code))
        self._pid_places = [i for i, (_, _, _, k) in enumerate(instructions) if k == OWN_PID]
        self._pointer = ctypes.byref(self._program)

    def install(self) -> None:
        """Restrict this process permanently. Needs no-new-privs. Raises OSError."""
        if self._pid_places:
            pid = os.getpid()
            for place in self._pid_places:
                self._code[place].k = pid
        kernel.prctl(kernel.PR_SET_SECCOMP, 2, self._pointer)


OWN_PID = 0x7FFF_FFF1  # stands for the process's own id until the filter is installed


def _refuse(number: int) -> Instruction:
    return (_RET, 0, 0, _ERRNO | number)


def _argument(index: int) -> int:
    """Offset of the low half of a system call's argument (both tables are little-endian)."""
    return 16 + 8 * index


def _when(nr: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body` (which must return on every path) for one system call."""
    assert len(body) < 256
    return [(_JEQ, 0, len(body), nr), *body]


def _one_of(argument: int, values: tuple[int, ...], otherwise: int) -> list[Instruction]:
    tests: list[Instruction] = [(_JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(_LD_W_ABS, 0, 0, _argument(argument)), *tests, _refuse(otherwise), (_RET, 0, 0, _ALLOW)]


def _none_of(argument: int, values: tuple[int, ...], otherwise: int) -> list[Instruction]:
    tests: list[Instruction] = [(_JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(_LD_W_ABS, 0, 0, _argument(argument)), *tests, (_RET, 0, 0, _ALLOW), _refuse(otherwise)]


def _no_bits(argument: int, bits: int, otherwise: int) -> list[Instruction]:
    return [(_LD_W_ABS, 0, 0, _argument(argument)), (_JSET, 0, 1, bits), _refuse(otherwise), (_RET, 0, 0, _ALLOW)]


def _opening(flags: int) -> list[Instruction]:
    """Truncating needs an open for writing: Landlock before ABI 3 allows O_TRUNC with O_RDONLY and O_ACCMODE."""
    return [
        (_LD_W_ABS, 0, 0, _argument(flags)),
        (_AND, 0, 0, _ACCESS_AND_TRUNCATE),
        (_JEQ, 1, 0, _TRUNCATE),
        (_JEQ, 0, 1, _TRUNCATE | _READ_AND_WRITE),
        _refuse(errno.EACCES),
        (_RET, 0, 0, _ALLOW),
    ]


def _fcntl() -> list[Instruction]:
    """Locks succeed without effect: no other process shares the program's files, and it must not lock foreign ones."""
    others = _one_of(1, _FCNTLS, errno.EPERM)[1:]
    to_end = len(_LOCKS) - 1 + len(others)
    locks: list[Instruction] = [(_JEQ, to_end - i, 0, value) for i, value in enumerate(_LOCKS)]
    return [(_LD_W_ABS, 0, 0, _argument(1)), *locks, *others, _refuse(0)]


def _stream_pairs() -> list[Instruction]:
    """Stream pairs only: asyncio needs one, and it is connected; a datagram socket could send to any address."""
    return [
        (_LD_W_ABS, 0, 0, _argument(0)),
        (_JEQ, 1, 0, _AF_UNIX),
        _refuse(errno.EPERM),
        (_LD_W_ABS, 0, 0, _argument(1)),
        (_AND, 0, 0, _SOCK_TYPE_MASK),
        (_JEQ, 1, 0, _SOCK_STREAM),
        _refuse(errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]


def _sockets() -> list[Instruction]:
    """Stream and datagram sockets of Unix and IPv4; an agent does not need raw ones or other families."""
    return [
        (_LD_W_ABS, 0, 0, _argument(0)),
        (_JEQ, 2, 0, _AF_UNIX),
        (_JEQ, 1, 0, _AF_INET),
        _refuse(errno.EAFNOSUPPORT),
        (_LD_W_ABS, 0, 0, _argument(1)),
        (_AND, 0, 0, _SOCK_TYPE_MASK),
        (_JEQ, 2, 0, _SOCK_STREAM),
        (_JEQ, 1, 0, _SOCK_DGRAM),
        _refuse(errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]


def _no_lent_priority() -> list[Instruction]:
    tests: list[Instruction] = [(_JEQ, len(_FUTEX_LENDS) - i, 0, value) for i, value in enumerate(_FUTEX_LENDS)]
    command: list[Instruction] = [(_LD_W_ABS, 0, 0, _argument(1)), (_AND, 0, 0, _FUTEX_COMMAND)]
    return [*command, *tests, (_RET, 0, 0, _ALLOW), _refuse(errno.ENOSYS)]


def _own_priority() -> list[Instruction]:
    own = _one_of(1, (0, OWN_PID), errno.EPERM)
    return [(_LD_W_ABS, 0, 0, _argument(0)), (_JEQ, 1, 0, _PRIO_PROCESS), _refuse(errno.EPERM), *own]


def _threads_alone() -> list[Instruction]:
    """Threads that share the process's descriptors: a separate table would have room for as many again."""
    thread = _CLONE_THREAD | _CLONE_FILES
    return [
        (_LD_W_ABS, 0, 0, _argument(0)),
        (_AND, 0, 0, thread),
        (_JEQ, 1, 0, thread),
        _refuse(errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]


def _opening_on_shared_disk(flags: int) -> list[Instruction]:
    """A scan cannot count unnamed files; a setuid file would give its uid to every user of this machine."""
    return [
        (_LD_W_ABS, 0, 0, _argument(flags)),
        (_JSET, 0, 1, _NAMELESS),
        _refuse(errno.EOPNOTSUPP),
        (_JSET, 1, 0, _CREATE),
        (_RET, 0, 0, _ALLOW),
        *_no_bits(flags + 1, _SET_ID, errno.EPERM),
    ]


def base_filter(*, command: bool = False) -> Filter:
    """The allow-list for a worker, or the first process of a command's jail, and everything it forks."""
    return Filter(base_program(command=command))


def base_program(*, command: bool = False) -> list[Instruction]:
    """The instructions of the base filter."""
    judged: dict[str, list[Instruction]] = {
        "open": _opening(1),
        "openat": _opening(2),
        "preadv2": _one_of(5, (0,), errno.EOPNOTSUPP),
        "pwritev2": _one_of(5, (0,), errno.EOPNOTSUPP),
        "mmap": _no_bits(3, _MAP_HUGETLB, errno.EPERM),
        "madvise": _one_of(2, _MADVISE, errno.EINVAL),
        "fcntl": _fcntl(),
        "futex": _no_lent_priority(),
        "membarrier": _one_of(0, _MEMBARRIERS, errno.EINVAL),
        "clone": _no_bits(0, _CLONE_NEW_ANY, errno.EPERM),
        "clone3": [_refuse(errno.ENOSYS)],
        "ioctl": _one_of(1, _IOCTLS, errno.ENOTTY),
        "prctl": _one_of(0, _PRCTLS, errno.EPERM),
        "socketpair": _stream_pairs(),
        "socket": _sockets(),
        "setsockopt": _one_of(1, _SOCKET_LEVELS, errno.EPERM),
    }
    program: list[Instruction] = [
        (_LD_W_ABS, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[platform.machine()]),
        (_RET, 0, 0, _KILL_PROCESS),
        (_LD_W_ABS, 0, 0, _NR),
        (_JGE, 0, 1, _X32_BIT),
        _refuse(errno.EPERM),
    ]
    for call in system_calls.table():
        if call.number is not None and (command or call.rule != system_calls.COMMAND):
            always = [_refuse(0)] if call.rule == system_calls.NOTHING else [(_RET, 0, 0, _ALLOW)]
            program += _when(call.number, judged.get(call.name, always))
    program += [(_JGE, 0, 1, _LAST_KNOWN + 1), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
    return program


class Reach(NamedTuple):
    """What a program may access besides itself; each flag allows more system calls."""

    processes: bool  # it may fork and exec
    own_pids: bool  # its pid namespace has no other processes
    own_uid: bool  # only its files belong to its uid
    own_files: bool  # its working folder is a separate file system
    command: bool = False  # it is a command of the user, alone in its network too


def program_filter(reach: Reach) -> Filter:
    """What a program may not do although its worker may."""
    return Filter(reach_program(reach))


def reach_program(reach: Reach) -> list[Instruction]:
    """The instructions of the program filter; OWN_PID stands for the process's id."""
    program: list[Instruction] = [(_LD_W_ABS, 0, 0, _NR)]
    for call in system_calls.table():
        if call.number is not None and (body := _for_program(call, reach)):
            program += _when(call.number, body)
    program += [(_RET, 0, 0, _ALLOW)]
    return program


def _for_program(call: system_calls.SystemCall, reach: Reach) -> list[Instruction]:
    """The instructions for a call of a program; empty if the base filter decides."""
    allowed = {system_calls.WORKER: reach.command, system_calls.PROCESSES: reach.processes}
    allowed |= {system_calls.OWNED: reach.own_uid, system_calls.PRIVATE: reach.own_files}
    if not allowed.get(call.rule, True):
        return [_refuse(errno.EOPNOTSUPP if call.name in _MAY_BE_UNSUPPORTED else errno.EPERM)]
    if call.name in ("prlimit64", "sched_getaffinity", "sched_getparam", "sched_getscheduler", "getpgid", "getsid"):
        return _one_of(0, (0, OWN_PID), errno.EPERM)
    if call.name in ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create"):
        return _no_bits(0, _CPU_CLOCK, errno.EINVAL)
    if call.name in ("kill", "tgkill", "tkill") and not reach.own_pids:
        return [_refuse(errno.EPERM)] if call.name == "tkill" else _one_of(0, (OWN_PID,), errno.EPERM)
    if call.rule == system_calls.COMMAND:
        return []  # judged by the base filter
    if call.name == "clone" and not reach.processes:
        return _threads_alone()
    always = {"prctl": _none_of(0, _WORKER_PRCTLS, errno.EPERM), "getpriority": _own_priority()}
    return always.get(call.name, [] if reach.own_files else _ON_SHARED_DISK.get(call.name, []))


_MAY_BE_UNSUPPORTED = (
    "fallocate",
    "getxattr",
    "lgetxattr",
    "listxattr",
    "llistxattr",
)  # programs expect that some file systems lack them
_ON_SHARED_DISK: dict[str, list[Instruction]] = {
    "open": _opening_on_shared_disk(1),
    "openat": _opening_on_shared_disk(2),
    "creat": _no_bits(1, _SET_ID, errno.EPERM),
    "chmod": _no_bits(1, _SET_ID, errno.EPERM),
    "fchmod": _no_bits(1, _SET_ID, errno.EPERM),
    "fchmodat": _no_bits(2, _SET_ID, errno.EPERM),
}
