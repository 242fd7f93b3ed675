"""Attacks that every pool runs against its jail before it accepts calls."""

import ast
from collections.abc import Awaitable, Callable

from rstar_ray.errors import SandboxError, SandboxLate, SandboxSlow
from rstar_ray.outcome import Outcome
from sandbox.request import ExecutionRequest, ExecutionResult

TEST_S = 30.0

PROBES = r"""
import ctypes, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(256)
escaped, tried = [], 0

def probe(name, attack):
    global tried
    tried += 1
    try:
        got = attack()
    except (OSError, ValueError):
        return
    if got is not False:
        escaped.append(name)

def call(number, *arguments):
    return lambda: libc.syscall(number, *arguments) >= 0

parent = os.getppid()
probe("uid 0", lambda: os.setuid(0))
probe("root's uid", lambda: 0 in os.getresuid())
probe("a network socket", lambda: socket.socket())
probe("a datagram socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
probe("a unix socket", lambda: socket.socket(socket.AF_UNIX))
probe("a datagram pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
probe("a fork", lambda: os.fork() or os._exit(0))
probe("an exec", lambda: os.execv("/bin/true", ["true"]))
probe("a new user namespace", lambda: libc.unshare(0x10000000) == 0)
probe("a mount", lambda: libc.mount(b"none", b"/", b"tmpfs", 0, None) == 0)
probe("ptrace of its worker", lambda: libc.ptrace(0x4206, parent, 0, 0) == 0)
probe("the worker's memory", lambda: open(f"/proc/{parent}/mem", "rb"))
probe("limits of its worker", lambda: __import__("resource").prlimit(parent, 7, (3, 3)))
probe("io_uring", call(425, 4, buffer))
probe("userfaultfd", call(323 if os.uname().machine == "x86_64" else 282, 0))
probe("keyctl", call(250 if os.uname().machine == "x86_64" else 219, 0, -3, 1))
probe("a memory file", lambda: os.memfd_create("x"))
probe("the password file", lambda: open("/etc/shadow"))
probe("root's home", lambda: os.listdir("/root/.ssh"))
probe("a file in /etc", lambda: open("/etc/sandbox-was-here", "w"))
probe("a file in /usr", lambda: open("/usr/sandbox-was-here", "w"))
probe("a device", lambda: os.mknod("device", 0o60666, os.makedev(254, 0)))
probe("foreign command lines", lambda: open(f"/proc/{parent}/environ"))
probe("a core dump", lambda: __import__("resource").setrlimit(4, (1 << 20, 1 << 20)))
print((tried, escaped))
"""


async def attack(run: Callable[..., Awaitable[ExecutionResult]]) -> int:
    """Run the probes with a pool's `run`; returns their number if all were refused.

    Raises SandboxError; SandboxSlow if the time was too short.
    """
    try:
        result = await run(ExecutionRequest(code=PROBES), "self-test", deadline_s=TEST_S)
    except SandboxLate as error:
        raise SandboxSlow(f"no self-test within {TEST_S:g} s") from error
    if result.outcome is Outcome.TIMEOUT:
        raise SandboxSlow(f"the self-test {result.reason}")
    contained, escaped = read_probes(result)
    if escaped:
        raise SandboxError(f"attacks of the self-test succeeded: {', '.join(escaped)}")
    return contained


def read_probes(result: ExecutionResult) -> tuple[int, list[str]]:
    """Number of attacks, and the names of those that succeeded."""
    try:
        tried, escaped = ast.literal_eval(result.stdout)
    except (SyntaxError, ValueError, TypeError):
        return 0, [f"a broken self-test ({result.outcome}: {result.stderr[-300:] or result.reason})"]
    return tried, list(escaped)
