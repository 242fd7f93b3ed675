"""A command of the user, with all processes that it starts: an agent, in a jail whose network holds one address.

Runs in a fresh interpreter with an empty environment, two descriptors and no threads. It builds the jail and becomes
its first process. It sends out the socket that listens at the jail's only address, so that a process outside answers
there. It starts the command, and ends everything when the command ends, or when the channel closes. At level `process`
there is no jail: it keeps the command's processes below itself, to end them.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import stat
from typing import Any, NoReturn

from sandbox.jail import build, kernel, seccomp

PORT = 8000
"""On the only address, 127.0.0.1. Every jail has a separate network, so the port is free."""
LOOK_MS = 100
"""Interval at which orphaned processes of the command are reaped after their end."""
REACH = seccomp.Reach(processes=True, own_pids=True, own_uid=True, own_files=True, command=True)


def main(channel: socket.socket, order: dict[str, Any]) -> NoReturn:
    """Run the command of an order (sandbox/command.py) to its end; messages over the channel are JSON."""
    confined = order["jail"]["level"] != "process"
    try:
        group = _enter(channel, order) if confined else None
        if not confined:
            build.announce(channel, os.getpid())
            os.setsid()
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        child = os.fork()
        if child == 0:
            _become_command(order, group, confined=confined)
        channel.send(json.dumps({"pid": child}).encode())
    except BaseException as error:
        channel.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    try:
        status = _until_the_end(channel, child)
        left = _end_all(first_process=confined)
        with contextlib.suppress(OSError):
            channel.send(json.dumps({"status": status, "left": left}).encode())
    finally:
        os._exit(0)


def _enter(channel: socket.socket, order: dict[str, Any]) -> "build.ControlGroup | None":
    spec = build.JailSpec(**order["jail"])
    if os.geteuid() == 0:  # else the jail's uid could not open /dev/stdout and /dev/stderr, pipes of root
        for descriptor in (1, 2):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                with contextlib.suppress(OSError):  # without CAP_CHOWN
                    os.fchown(descriptor, spec.first_uid + order["number"], -1)
    jail = build.enter(spec, order["number"], "", order["group"], channel)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", PORT))
        listener.listen(128)
        socket.send_fds(channel, [b"{}"], [listener.fileno()])
    seccomp.base_filter(command=True).install()
    return jail.group


def _become_command(order: dict[str, Any], group: "build.ControlGroup | None", *, confined: bool) -> NoReturn:
    try:
        os.setsid() if confined else kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if group is not None:
            group.join()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, and exec keeps that
            signal.signal(number, signal.SIG_DFL)
        if confined:  # DATA, not AS: runtimes reserve address space that they never use
            resource.setrlimit(resource.RLIMIT_DATA, (order["memory_bytes"], order["memory_bytes"]))
            seccomp.program_filter(REACH).install()
        os.chdir(order["folder"])
        os.closerange(3, 256)
        os.execve(order["argv"][0], order["argv"], order["env"])
    except BaseException as error:
        os.write(2, f"{order['argv'][0]}: {error}\n".encode("utf-8", "backslashreplace"))
    finally:
        os._exit(127)


def _until_the_end(channel: socket.socket, child: int) -> int | None:
    """The command's wait status; None if its parent has asked it to end or has exited."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(LOOK_MS)]
        if (status := _reap(child)) is not None:
            return status
        if channel.fileno() in ready:
            return None


def _reap(child: int) -> int | None:
    """Reap ended children; returns the status of `child` if it is among them."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, child):
            return status if ended else None


def _end_all(*, first_process: bool) -> int:
    """End every process below this one; returns how many were alive."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    left = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            with contextlib.suppress(ProcessLookupError):
                if first_process:
                    os.kill(-1, signal.SIGKILL)
            for pid in () if first_process else _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
            left += 1
    return left


def _children() -> list[int]:
    with open("/proc/thread-self/children", encoding="ascii") as children:  # noqa: PTH123
        return [int(pid) for pid in children.read().split()]
