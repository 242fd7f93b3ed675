"""The system calls that a program may make, and why: one row per call, all others are refused.

The numbers are those of x86_64 and of the generic table (aarch64; `-` if it has no such call). The rules:

`free`       with any arguments
`nothing`    succeeds without effect: its effect could reach files that are not the program's
`judged`     with some arguments only; sandbox/jail/seccomp.py has them
`owned`      not if programs share the server's uid: they could change its files
`private`    not if the working folder is on the host's disk, beside the files of others (landlock)
`worker`     by the worker only: the program filter removes it
`processes`  by programs that may have processes (C++), and by the worker
`command`    by a command of the user only, whose network namespace has one address (sandbox/jail/command.py)
"""

import errno
import platform
from typing import NamedTuple

FREE, NOTHING, JUDGED = "free", "nothing", "judged"
OWNED, PRIVATE, WORKER, PROCESSES, COMMAND = "owned", "private", "worker", "processes", "command"


class SystemCall(NamedTuple):
    """One row of the table."""

    name: str
    number: int | None  # on this machine; None where it does not exist here
    rule: str
    reason: str


_TABLE = """
read 0 63 free | its input and its files
write 1 64 free | its output, counted by the worker, and its files, bounded by size and folder
readv 19 65 free | as read
writev 20 66 free | as write
pread64 17 67 free | as read
pwrite64 18 68 free | as write
preadv 295 69 free | as read
pwritev 296 70 free | as write
preadv2 327 286 judged | only without flags: RWF_NOWAIT shows what is in the page cache, so what others read
pwritev2 328 287 judged | as preadv2
open 2 - judged | what mounts or Landlock allow; truncates only writable files; on a shared disk none unnamed or setuid
openat 257 56 judged | as open
creat 85 - judged | open for writing
close 3 57 free | its own descriptors
close_range 436 436 free | as close
stat 4 - free | imports look for files; Landlock does not restrict it to the program's files
fstat 5 80 free | its own descriptors
lstat 6 - free | as stat
newfstatat 262 79 free | as stat
statx 332 291 free | as stat
access 21 - free | as stat
faccessat 269 48 free | as stat
faccessat2 439 439 free | as stat
lseek 8 62 free | its own descriptors
mmap 9 222 judged | memory within its address space; not the machine's reserve of huge pages
mprotect 10 226 free | its own memory; ctypes and compiled code need executable pages
munmap 11 215 free | its own memory
mremap 25 216 free | its own memory, within its address space
msync 26 227 nothing | its mappings are temporary; for a foreign file it would make the host write to disk
madvise 28 233 judged | hints for its own memory; none that evicts cached files of others, or compares pages with theirs
brk 12 214 free | its own memory
rt_sigaction 13 134 free | its own handlers
rt_sigprocmask 14 135 free | its own mask; limits do not depend on it
rt_sigreturn 15 139 free | the end of a handler
rt_sigpending 127 136 free | its own signals
rt_sigtimedwait 128 137 free | waits
rt_sigsuspend 130 133 free | waits
sigaltstack 131 132 free | its own stack
dup 32 23 free | its own descriptors
dup2 33 - free | its own descriptors
dup3 292 24 free | its own descriptors
pipe 22 - free | its own; 64 KiB each, and no more than its descriptors
pipe2 293 59 free | as pipe
select 23 - free | waits
pselect6 270 72 free | waits
poll 7 - free | waits
ppoll 271 73 free | waits
epoll_create 213 - free | asyncio waits with it
epoll_create1 291 20 free | as epoll_create
epoll_ctl 233 21 free | as epoll_create
epoll_wait 232 - free | waits
epoll_pwait 281 22 free | waits
epoll_pwait2 441 441 free | waits
eventfd 284 - free | wakes its own threads
eventfd2 290 19 free | as eventfd
signalfd 282 - free | its own signals
signalfd4 289 74 free | as signalfd
timerfd_create 283 85 free | waits
timerfd_settime 286 86 free | waits
timerfd_gettime 287 87 free | waits
timer_create 222 107 judged | its own timers, as many as signals may be pending; by clock_gettime's clocks
timer_settime 223 110 free | as timer_create
timer_gettime 224 108 free | as timer_create
timer_getoverrun 225 109 free | as timer_create
timer_delete 226 111 free | as timer_create
nanosleep 35 101 free | waits
clock_nanosleep 230 115 judged | waits, by clock_gettime's clocks
clock_gettime 228 113 judged | the time; a negative clock is the CPU time of a process, of any visible one
clock_getres 229 114 judged | the time, by clock_gettime's clocks
gettimeofday 96 169 free | the time
time 201 - free | the time
times 100 153 free | its own CPU time
getitimer 36 102 free | its own timer
setitimer 38 103 free | its own timer
alarm 37 - free | its own timer
pause 34 - free | waits
sched_yield 24 124 free | gives up the core
sched_getaffinity 204 123 judged | of itself only: it would show whether another process exists
sched_setaffinity 203 122 worker | the worker ties a program of many processes to one core
sched_getparam 143 121 judged | of itself alone
sched_getscheduler 145 120 judged | of itself alone
sched_get_priority_max 146 125 free | a constant
sched_get_priority_min 147 126 free | a constant
getpriority 140 141 judged | of itself only: it would show whether another process, or a process of a user, exists
getpid 39 172 free | its own id
getppid 110 173 free | its worker's id
gettid 186 178 free | its own id
getuid 102 174 free | its own id
geteuid 107 175 free | its own id
getgid 104 176 free | its own id
getegid 108 177 free | its own id
getresuid 118 148 free | its own ids
getresgid 120 150 free | its own ids
getgroups 115 158 free | its own ids
getpgrp 111 - free | its own group
getpgid 121 155 judged | of itself alone
getsid 124 156 judged | of itself alone
uname 63 160 free | the kernel's name
sysinfo 99 179 free | memory size and load; it can measure the load by timing anyway
getrusage 98 165 free | its own use
getrlimit 97 163 free | its own limits
setrlimit 160 164 free | its own limits, which it can only lower
prlimit64 302 261 judged | its own limits alone
getcwd 79 17 free | its working folder
chdir 80 49 free | within what it sees
fchdir 81 50 free | as chdir
mkdir 83 - free | its own folder
mkdirat 258 34 free | its own folder
rmdir 84 - free | its own folder
unlink 87 - free | its own folder
unlinkat 263 35 free | its own folder
rename 82 - free | its own folder
renameat 264 38 free | its own folder
renameat2 316 276 free | its own folder
link 86 - free | its own folder
linkat 265 37 free | its own folder
symlink 88 - free | its own folder; the sandbox follows no link
symlinkat 266 36 free | as symlink
readlink 89 - free | as stat
readlinkat 267 78 free | as stat
chmod 90 - owned | its own files; on a shared disk none becomes setuid
fchmod 91 52 owned | its own files; on a shared disk none becomes setuid
fchmodat 268 53 owned | its own files; on a shared disk none becomes setuid
chown 92 - owned | its own files
lchown 94 - owned | its own files
fchown 93 55 owned | its own files
fchownat 260 54 owned | its own files
utime 132 - private | its own files; devices are mounted read-only, so that their times do not change
utimes 235 - private | as utime
utimensat 280 88 private | as utime
futimesat 261 - private | as utime
truncate 76 45 private | its own files; Landlock before ABI 3 does not check it
ftruncate 77 46 free | files it has opened for writing
fallocate 285 47 private | its own files; on a shared disk it would take gigabytes at once
fsync 74 82 nothing | its files are temporary; for a foreign one it would make the host write to disk
fdatasync 75 83 nothing | as fsync
umask 95 166 free | its own mask
getdents 78 - free | lists folders
getdents64 217 61 free | lists folders
statfs 137 43 free | room on a file system
fstatfs 138 44 free | as statfs
fadvise64 221 223 nothing | a hint; it would evict cached files of others
readahead 187 213 nothing | a hint
sendfile 40 71 free | copies between its own descriptors
flock 73 32 nothing | only its processes use its folder; a lock on a foreign file would block the host
fcntl 72 25 judged | duplicates and flags of descriptors; locks do nothing; no notifications, leases or signals
getxattr 191 8 private | attributes of files; Landlock does not restrict reading them by path
lgetxattr 192 9 private | as getxattr
fgetxattr 193 10 free | of files it has opened
listxattr 194 11 private | as getxattr
llistxattr 195 12 private | as getxattr
flistxattr 196 13 free | of files it has opened
futex 202 98 judged | locks of the program's threads; not those with priority inheritance, which wait for any thread
set_robust_list 273 99 free | its own threads
set_tid_address 218 96 free | its own threads
arch_prctl 158 - free | thread-local storage
rseq 334 293 free | its own threads
membarrier 324 283 judged | for its own threads; the global kinds interrupt every core
getrandom 318 278 free | random bytes
getcpu 309 168 free | which core it is on
restart_syscall 219 128 free | the kernel's own
exit 60 93 free | its end
exit_group 231 94 free | its end
wait4 61 260 free | its own children; a Python program has none
waitid 247 95 free | as wait4
kill 62 129 judged | in a separate pid namespace any visible process; elsewhere only itself
tgkill 234 131 judged | as kill
tkill 200 130 judged | only in a separate pid namespace
clone 56 220 judged | threads that share their process's descriptors; processes where allowed; never a namespace
clone3 435 435 judged | fails with ENOSYS, as a filter cannot read its flags in memory; libc falls back to clone
fork 57 - processes | g++ and the program that it makes
vfork 58 - processes | as fork
execve 59 221 processes | as fork
ioctl 16 29 judged | how much is in a pipe, non-blocking, close-on-exec, is it a terminal
prctl 157 167 judged | names of threads and of memory; the settings that the worker still makes
socketpair 53 199 judged | a connected pair of streams, which reaches no other process; asyncio needs one
recvfrom 45 207 free | its own pairs
sendto 44 206 free | its own pairs
recvmsg 47 212 worker | the worker receives descriptors with it
sendmsg 46 211 worker | descriptors that were sent in a circle outlive their program
shutdown 48 210 free | its own pairs
getsockopt 55 209 free | its own pairs
getsockname 51 204 free | its own pairs
getpeername 52 205 free | its own pairs
pidfd_open 434 434 worker | the worker waits for its program with it
socket 41 198 command | IPv4 in a network with one address, and Unix sockets, of which it sees only its own
connect 42 203 command | as socket
bind 49 200 command | as socket
listen 50 201 command | as socket
accept 43 202 command | as socket
accept4 288 242 command | as socket
setsockopt 54 208 command | of the socket layer, of IP and of TCP
setsid 112 157 command | its own processes
setpgid 109 154 command | its own processes
"""


def _read(line: str) -> SystemCall:
    about, reason = line.split(" | ")
    name, x86_64, aarch64, rule = about.split()
    number = {"x86_64": x86_64, "aarch64": aarch64}.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no system call table for {platform.machine()}")
    return SystemCall(name, None if number == "-" else int(number), rule, reason)


def table() -> list[SystemCall]:
    """Every call that is not always refused. Raises OSError on an architecture without a table."""
    return [_read(line) for line in _TABLE.strip().splitlines()]


def numbers(*, command: bool = False) -> dict[str, int]:
    """Name to number of the calls that exist on this machine, for a program or for a command of the user."""
    return {call.name: call.number for call in table() if call.number is not None and (command or call.rule != COMMAND)}
