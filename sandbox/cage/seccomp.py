"""Seccomp filters in classic BPF, written by hand and installed through prctl(2).

Two filters stack. The *base* filter is installed once per cell: an allow-list of what Python and
numeric libraries need; everything else fails with EPERM (ENOSYS for calls this table does not
know, so that libc falls back). The *program* filter is installed in every child: it takes away
what only the cell itself needs. A program can add filters but remove none.
"""

import ctypes
import errno
import os
import platform

from sandbox.cage import kernel

# name:x86_64:aarch64 (the generic numbers); a missing third part does not exist on aarch64.
_ALLOWED = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
preadv2:327:286 pwritev2:328:287 open:2 openat:257:56 openat2:437:437 creat:85 close:3:57 close_range:436:436
stat:4 fstat:5:80 lstat:6 newfstatat:262:79 statx:332:291 access:21 faccessat:269:48 faccessat2:439:439
lseek:8:62 mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233
brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 dup:32:23 dup2:33 dup3:292:24 pipe:22
pipe2:293:59 select:23 pselect6:270:72 poll:7 ppoll:271:73 epoll_create:213 epoll_create1:291:20
epoll_ctl:233:21 epoll_wait:232 epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284 eventfd2:290:19
signalfd:282 signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169
time:201 times:100:153 getitimer:36:102 setitimer:38:103 alarm:37 pause:34 sched_yield:24:124
sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
sched_get_priority_min:147:126 getpriority:140:141 getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174
geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158
getpgrp:111 getpgid:121:155 getsid:124:156 uname:63:160 sysinfo:99:179 getrusage:98:165 getrlimit:97:163
setrlimit:160:164 prlimit64:302:261 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83 mkdirat:258:34 rmdir:84
unlink:87 unlinkat:263:35 rename:82 renameat:264:38 renameat2:316:276 link:86 linkat:265:37 symlink:88
symlinkat:266:36 readlink:89 readlinkat:267:78 chmod:90 fchmod:91:52 fchmodat:268:53 chown:92 lchown:94
fchown:93:55 fchownat:260:54 utime:132 utimes:235 utimensat:280:88 futimesat:261 truncate:76:45
ftruncate:77:46 fallocate:285:47 fsync:74:82 fdatasync:75:83 umask:95:166 getdents:78 getdents64:217:61
statfs:137:43 fstatfs:138:44 fadvise64:221:223 readahead:187:213 sendfile:40:71 copy_file_range:326:285
splice:275:76 tee:276:77 flock:73:32 fcntl:72:25 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10
listxattr:194:11 llistxattr:195:12 flistxattr:196:13 futex:202:98 futex_waitv:449:449 set_robust_list:273:99
get_robust_list:274:100 set_tid_address:218:96 arch_prctl:158 rseq:334:293 membarrier:324:283
getrandom:318:278 getcpu:309:168 restart_syscall:219:128 exit:60:93 exit_group:231:94 wait4:61:260
waitid:247:95 kill:62:129 tgkill:234:131 tkill:200:130 fork:57 vfork:58 execve:59:221 recvfrom:45:207
sendto:44:206 recvmsg:47:212 sendmsg:46:211 shutdown:48:210 getsockopt:55:209 getsockname:51:204
getpeername:52:205 pidfd_open:434:434
"""
# Allowed for some arguments only.
_JUDGED = "clone:56:220 clone3:435:435 ioctl:16:29 prctl:157:167 socketpair:53:199"

# Known to no table above, refused with EPERM rather than ENOSYS up to this number.
_LAST_KNOWN = 462
_X32_BIT = 0x40000000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LD_W_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH = 0, 4

_CLONE_THREAD = 0x00010000
_CLONE_NEW_ANY = 0x7E020080
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: all that files and pipes need.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_SET_PDEATHSIG (not for programs), PR_GET_DUMPABLE, PR_SET_DUMPABLE, PR_SET_NAME, PR_GET_NAME,
# PR_SET_SECCOMP, PR_GET_NO_NEW_PRIVS, PR_SET_VMA.
_PRCTLS = (1, 3, 4, 15, 16, 22, 39, 0x53564D41)

Instruction = tuple[int, int, int, int]


class _SockFilter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _table(text: str) -> dict[str, int]:
    column = {"x86_64": 1, "aarch64": 2}.get(platform.machine())
    if column is None:
        raise OSError(errno.ENOSYS, f"no system call table for {platform.machine()}")
    rows = [entry.split(":") for entry in text.split()]
    return {row[0]: int(row[column]) for row in rows if len(row) > column}


class Filter:
    """A BPF program kept in memory, ready to be installed in this process."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self._code = (_SockFilter * len(instructions))(*instructions)
        self._program = _SockFprog(len(instructions), ctypes.addressof(self._code))
        self._pid_slots = [i for i, (_, _, _, k) in enumerate(instructions) if k == OWN_PID]
        self._pointer = ctypes.byref(self._program)

    def install(self) -> None:
        """Bind this process, for good. Needs no-new-privs. Raises OSError."""
        if self._pid_slots:
            pid = os.getpid()
            for slot in self._pid_slots:
                self._code[slot].k = pid
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


def base_filter() -> Filter:
    """The allow-list for a cell and everything it forks."""
    allowed = sorted(_table(_ALLOWED).values())
    judged = _table(_JUDGED)
    program: list[Instruction] = [
        (_LD_W_ABS, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT_ARCH[platform.machine()]),
        (_RET, 0, 0, _KILL_PROCESS),
        (_LD_W_ABS, 0, 0, _NR),
        (_JGE, 0, 1, _X32_BIT),
        _refuse(errno.EPERM),
    ]
    for nr in allowed:
        program += [(_JEQ, 0, 1, nr), (_RET, 0, 0, _ALLOW)]
    # Threads and forks, but no namespace; clone3 hides its flags from us, and libc falls back.
    program += _when(
        judged["clone"],
        [
            (_LD_W_ABS, 0, 0, _argument(0)),
            (_JSET, 0, 1, _CLONE_NEW_ANY),
            _refuse(errno.EPERM),
            (_RET, 0, 0, _ALLOW),
        ],
    )
    program += _when(judged["clone3"], [_refuse(errno.ENOSYS)])
    program += _when(judged["ioctl"], _one_of(1, _IOCTLS, errno.ENOTTY))
    program += _when(judged["prctl"], _one_of(0, _PRCTLS, errno.EPERM))
    # A connected pair reaches nobody (asyncio needs one); datagram sockets could be sent anywhere.
    program += _when(
        judged["socketpair"],
        [
            (_LD_W_ABS, 0, 0, _argument(0)),
            (_JEQ, 1, 0, _AF_UNIX),
            _refuse(errno.EPERM),
            (_LD_W_ABS, 0, 0, _argument(1)),
            (_AND, 0, 0, _SOCK_TYPE_MASK),
            (_JEQ, 1, 0, _SOCK_STREAM),
            _refuse(errno.EPERM),
            (_RET, 0, 0, _ALLOW),
        ],
    )
    program += [(_JGE, 0, 1, _LAST_KNOWN + 1), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
    return Filter(program)


def program_filter(*, processes_allowed: bool, signals_to_others: bool) -> Filter:
    """What a program may not do although its cell may.

    `processes_allowed`: it may fork and exec. `signals_to_others`: its pid namespace holds
    nobody else, so signals need no filter.
    """
    numbers = _table(_ALLOWED)
    judged = _table(_JUDGED)
    program: list[Instruction] = [(_LD_W_ABS, 0, 0, _NR)]
    # Another process's limits; a process's own are asked for as 0 or by its id.
    program += _when(numbers["prlimit64"], _one_of(0, (0, OWN_PID), errno.EPERM))
    program += _when(numbers["pidfd_open"], [_refuse(errno.EPERM)])
    # PR_SET_PDEATHSIG: the program ends with its cell.
    program += _when(
        judged["prctl"],
        [(_LD_W_ABS, 0, 0, _argument(0)), (_JEQ, 0, 1, 1), _refuse(errno.EPERM), (_RET, 0, 0, _ALLOW)],
    )
    if not processes_allowed:
        for name in ("fork", "vfork", "execve"):
            if name in numbers:
                program += _when(numbers[name], [_refuse(errno.EPERM)])
        program += _when(
            judged["clone"],
            [
                (_LD_W_ABS, 0, 0, _argument(0)),
                (_JSET, 1, 0, _CLONE_THREAD),
                _refuse(errno.EPERM),
                (_RET, 0, 0, _ALLOW),
            ],
        )
    if not signals_to_others:
        for name in ("kill", "tgkill"):
            program += _when(numbers[name], _one_of(0, (OWN_PID,), errno.EPERM))
        program += _when(numbers["tkill"], [_refuse(errno.EPERM)])
        # F_SETOWN and its kin (8, 10, 15) aim a file's signals at any process; F_NOTIFY (1026) sends them.
        program += _when(
            numbers["fcntl"],
            [
                (_LD_W_ABS, 0, 0, _argument(1)),
                (_JEQ, 4, 0, 8),
                (_JEQ, 3, 0, 10),
                (_JEQ, 2, 0, 15),
                (_JEQ, 1, 0, 1026),
                (_RET, 0, 0, _ALLOW),
                _refuse(errno.EPERM),
            ],
        )
    program += [(_RET, 0, 0, _ALLOW)]
    return Filter(program)
