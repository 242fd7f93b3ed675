"""The pool's handles for its processes, warm servers and workers, each with a non-blocking channel."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.jail import wire
from sandbox.jail.build import JailSpec

ROOT = str(Path(__file__).resolve().parent.parent)
MAX_CODE_BYTES = 16 * 1024  # always fits into an empty channel, with the input; longer code is sent in a sealed file
MAX_STDIN_BYTES = 4096  # fits into every pipe (of one page at least) before a program reads; longer input is a file
MAX_REPLY_BYTES = 256 * 1024 * 1024
_F_ADD_SEALS, _ALL_SEALS = 1033, 0xF
_BOOT = (
    "import sys,socket,json;c=socket.socket(fileno=int(sys.argv[1]));f=c.makefile('rb');g=json.loads(f.readline());"
    "sys.path.insert(0,g['root']);from sandbox.jail import fork_server as s;s.forget_paths();f.detach() and s.main(c,g)"
)
# The whole environment: programs can read it, and ours may contain secrets.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "tool",
    "PYTHONHASHSEED": "0",  # makes the order of sets reproducible
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


class Channel:
    """One end of a socket pair; the event loop reads it and splits it into messages."""

    def __init__(self, on_message: Callable[[int, memoryview], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self._buffer = bytearray(64 * 1024)
        self._filled = 0
        self._wants_pidfd = False
        self.pidfd = -1
        self._noted_runs: int | None = None  # number of runs when its silence was first suspicious
        self._loop.add_reader(self.ours.fileno(), self._read)

    def expect_pidfd(self) -> None:
        """Expect a descriptor of the other process with the first byte."""
        self._wants_pidfd = True

    def hand_over(self) -> None:
        """Close the other end after a process has received it."""
        self.theirs.close()

    def _read(self) -> None:
        try:
            if self._wants_pidfd:
                got = self._receive_pidfd()
            else:
                got = self.ours.recv_into(memoryview(self._buffer)[self._filled :])
        except BlockingIOError:
            return
        except OSError:
            got = 0
        if got == 0:
            self._end()
            return
        if got > 0:
            self._filled += got
            self._cut_messages()

    def _receive_pidfd(self) -> int:
        data, files, _, _ = socket.recv_fds(self.ours, 1, 1)
        if not data:
            return 0
        self._wants_pidfd = False
        if files:
            self.pidfd = files[0]
            return -1
        self._buffer[:1] = data  # it failed before there was a process
        return 1

    def _cut_messages(self) -> None:
        at = 0
        view = memoryview(self._buffer)
        while self._filled - at >= wire.REPLY_BYTES:
            kind, length = wire.unpack_reply(view[at:])
            if length > MAX_REPLY_BYTES:
                self._end()
                return
            end = at + wire.REPLY_BYTES + length
            if end > len(self._buffer):
                self._buffer = bytearray(self._buffer[at : self._filled]) + bytes(end - self._filled + 64 * 1024)
                self._filled -= at
                return
            if end > self._filled:
                break
            self.trust()
            self._on_message(kind, view[at + wire.REPLY_BYTES : end])
            if self.ours.fileno() < 0:
                return
            at = end
        if at:
            rest = self._buffer[at : self._filled]
            self._buffer[: len(rest)] = rest
            self._filled = len(rest)

    def _end(self) -> None:
        self.close()
        self._on_end()

    def wants_to_run(self) -> bool:
        """Whether the process waits for a core or a page, which explains its silence; True if /proc cannot be read."""
        try:
            return _stat_of(self._pid())[0] in "RD"
        except OSError as error:
            return error.errno in (errno.EMFILE, errno.ENFILE)
        except (StopIteration, IndexError):
            return False

    def suspect(self) -> None:
        """Record how often the process has run, unless it is recorded already."""
        if self._noted_runs is None:
            self._noted_runs = self._runs()

    def trust(self) -> None:
        """Clear the suspicion: a message has arrived, or none was due until now."""
        self._noted_runs = None

    def has_run(self) -> bool:
        """Whether the process has run since `suspect`; calls `suspect` and returns True if it was not called before."""
        if self._noted_runs is None:
            self.suspect()
            return True
        return self._runs() != self._noted_runs

    def _runs(self) -> int:
        """Number of context switches of the process; -1 if /proc cannot be read."""
        try:
            status = Path(f"/proc/{self._pid()}/status").read_text("utf-8", "replace")
        except (OSError, StopIteration, IndexError):
            return -1
        return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches:" in line)

    def has_spoken(self) -> bool:
        """Whether unread data has arrived."""
        try:
            return bool(self.ours.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def num_threads_below(self) -> int:
        """Threads of the process's child, the program; 0 if there is none or /proc cannot be read."""
        try:
            pid = self._pid()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
            return max((int(_stat_of(child)[17]) for child in children), default=0)
        except (OSError, StopIteration, IndexError):
            return 0

    def _pid(self) -> str:
        about = Path(f"/proc/self/fdinfo/{self.pidfd}").read_text("ascii")
        return next(line.split()[1] for line in about.splitlines() if line.startswith("Pid:"))

    def close(self) -> None:
        """Close the channel; the process then ends itself."""
        if self.ours.fileno() >= 0:
            self._loop.remove_reader(self.ours.fileno())
            self.ours.close()
        self.theirs.close()

    def kill(self) -> None:
        """Kill the process and close the channel."""
        if self.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
            self.pidfd = -1
        self.close()


def _stat_of(pid: str) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent ..."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()


class ForkServer:
    """A process with libraries imported that forks workers."""

    def __init__(
        self,
        preload_set: str,
        python: str,
        sys_path: list[str],
        spec: JailSpec,
        on_ready: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.preload_set = preload_set
        self.ready = False
        self.last_heard = asyncio.get_running_loop().time()
        self.pinged = False
        self.memory_bytes = 0
        self._on_ready = on_ready
        self._on_end = on_end
        self._reason = "it ended without a report"
        self.channel = Channel(self._hear, self._ended)
        number = self.channel.theirs.fileno()
        try:
            self._process = self._start(python, number)
            self.channel.pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self.channel.close()  # ends the process, if it has started
            raise
        self.channel.hand_over()
        config: dict[str, Any] = {
            "root": ROOT,
            "preload_set": preload_set,
            "sys_path": sys_path,
            "jail": spec._asdict(),
        }
        with contextlib.suppress(OSError):  # it has ended already, which the channel reports
            self.channel.ours.send(json.dumps(config).encode() + b"\n")

    @staticmethod
    def _start(python: str, number: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOT, str(number)],
            env=ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork_worker(self, number: int, home: str, group: str, channel: Channel) -> None:
        """Request a new worker at the other end of `channel`. Raises OSError."""
        order = json.dumps({"number": number, "home": home, "group": group}).encode()
        channel.expect_pidfd()
        socket.send_fds(self.channel.ours, [order], [channel.theirs.fileno()])
        channel.hand_over()

    def ping(self) -> None:
        self.pinged = True
        self.channel.trust()
        with contextlib.suppress(OSError):
            self.channel.ours.send(wire.SERVER_PING)

    def _hear(self, kind: int, payload: memoryview) -> None:
        self.last_heard = asyncio.get_running_loop().time()
        self.pinged = False
        if kind == wire.FAILED:
            self._reason = bytes(payload).decode("utf-8", "replace")
            return
        self.memory_bytes = int(bytes(payload) or b"0")
        if kind == wire.HELLO:
            self.ready = True
            self._on_ready()

    def _ended(self) -> None:
        self.kill()
        self._on_end(self._reason)

    def kill(self) -> None:
        """Kill the server; its workers continue until they are released."""
        self.channel.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)


class WorkerHandle:
    """The pool's handle of one worker."""

    def __init__(
        self, number: int, preload_set: str, on_event: Callable[["WorkerHandle", int, memoryview], None]
    ) -> None:
        self.number = number
        self.preload_set = preload_set
        self.ready = False
        self.pinged = False
        self.calls = 0
        self.call: Any = None  # the pool's record of its current call
        self.failure = ""
        self.facts: dict[str, Any] = {}
        self.last_heard = asyncio.get_running_loop().time()
        self._on_event = on_event
        self.channel = Channel(self._hear, self._ended)

    def _hear(self, kind: int, payload: memoryview) -> None:
        self.last_heard = asyncio.get_running_loop().time()
        self.pinged = False
        if kind == wire.FAILED:
            self.failure = bytes(payload).decode("utf-8", "replace")
        elif kind == wire.HELLO:
            self.ready = True
            self.facts = json.loads(bytes(payload))
            self._on_event(self, kind, payload)
        elif kind == wire.RESULT:
            self._on_event(self, kind, payload)

    def _ended(self) -> None:
        self.channel.kill()
        self._on_event(self, wire.FAILED, memoryview(b""))

    def send(self, call: wire.CallHeader, code: bytes, stdin: bytes) -> None:
        """Send a program to an idle worker. Raises OSError if the worker does not accept it."""
        self.channel.trust()
        files: list[int] = []
        try:
            flags = call.flags
            if len(code) > MAX_CODE_BYTES:
                files.append(sealed_file(code))
                flags |= wire.CODE_IN_FD
                code = b""
            if len(stdin) > MAX_STDIN_BYTES:
                files.append(sealed_file(stdin))
                flags |= wire.STDIN_IN_FD
                stdin = b""
            message = call._replace(flags=flags).pack() + code + stdin
            channel = self.channel.ours
            sent = socket.send_fds(channel, [message], files) if files else channel.send(message)
        finally:
            for descriptor in files:
                os.close(descriptor)
        if sent < len(message):
            raise BlockingIOError("the worker does not read")

    def ping(self) -> None:
        """Request a sign of life."""
        self.pinged = True
        self.channel.trust()
        self.say(wire.PING)

    def say(self, kind: int) -> None:
        """Send a message without content."""
        with contextlib.suppress(OSError):
            self.channel.ours.send(wire.bare(kind))


def sealed_file(data: bytes) -> int:
    """A descriptor of an immutable file in memory, positioned at its start."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _ALL_SEALS)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
