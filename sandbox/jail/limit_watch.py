"""Enforces the limits of a running program from its parent process."""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable

from sandbox.jail import wire
from sandbox.jail.control_group import ControlGroup
from sandbox.jail.scratch import too_much_in
from sandbox.jail.stream import CHUNK, Stream

FIRST_WAIT_S = 0.01  # most programs end within it; their output then waits in the pipes
BEAT_S = 0.25
GONE_S = 15.0  # a killed program ends within it, even if it must wait for a CPU core
SCAN_S = 0.05  # between two scans of a folder that the kernel does not bound
CORES = os.cpu_count() or 1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Watch:
    """Waits for the end of one program after another: reads output, counts use, and kills at limits."""

    def __init__(self, channel: socket.socket, storage: str, group: ControlGroup | None = None) -> None:
        self._channel = channel
        self._number = channel.fileno()
        self._storage = storage  # a folder to scan regularly; empty if the kernel bounds it
        self._group = group  # of programs with processes, if there is one
        self._poll = select.poll()
        self._poll.register(self._number, select.POLLIN)

    def until_the_end(
        self, call: wire.CallHeader, child: int, handle: int, streams: dict[int, Stream], started: float
    ) -> int:
        """Return why `child` was ended, or NOT_ENDED if it ended by itself.

        `handle` is its pidfd; `streams` are its pipes, and this removes those that reach their end.
        """
        poll = self._poll
        poll.register(handle, select.POLLIN)
        ready = poll.poll(min(FIRST_WAIT_S, call.wall_s) * 1000)
        if ready != [(handle, select.POLLIN)]:
            pipes = list(streams)
            for pipe in pipes:
                poll.register(pipe, select.POLLIN)
            reason = self._wait(call, child, handle, streams, started)
            for pipe in pipes:
                with contextlib.suppress(KeyError):
                    poll.unregister(pipe)
        else:
            reason = wire.NOT_ENDED
        poll.unregister(handle)
        if reason != wire.NOT_ENDED:
            self.wait_until_gone(handle)
        return reason

    def wait_until_gone(self, handle: int) -> None:
        """Wait until a killed process is gone, for which it needs a CPU core, and send beats meanwhile."""
        end = time.monotonic() + GONE_S
        while not select.select([handle], [], [], BEAT_S)[0] and time.monotonic() < end:
            self.beat()

    def beat(self) -> None:
        """Notify the pool that this worker is alive."""
        self._channel.sendall(wire.reply(wire.BEAT))

    def _wait(self, call: wire.CallHeader, child: int, handle: int, streams: dict[int, Stream], started: float) -> int:
        cpu_clock = (~child << 3) | 2  # the CPU clock of a process, see clock_getcpuclockid(3)
        many = bool(call.flags & wire.PROCESSES_ALLOWED)
        next_beat, next_scan = started + BEAT_S, started
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self.beat()
                next_beat = now + BEAT_S
            if self._storage and now >= next_scan:
                if too_much_in(self._storage):
                    return _end(child, wire.STORAGE)
                now = time.monotonic()
                next_scan = now + SCAN_S
            wall_left = call.wall_s - (now - started)
            cpu_left = call.cpu_s - (self._cpu_of_tree(cpu_clock) if many else _cpu_used(cpu_clock))
            if cpu_left <= 0:
                return _end(child, wire.CPU_TIME)
            if wall_left <= 0:
                return _end(child, wire.WALL_TIME)
            # Threads outside the interpreter lock may use several cores at once.
            wait_s = min(wall_left, max(cpu_left / CORES, 0.005), next_beat - now)
            if self._storage:
                wait_s = min(wait_s, next_scan - now)
            for descriptor, _ in self._poll.poll(max(wait_s, 0) * 1000 + 0.5):
                if descriptor == handle:
                    return wire.NOT_ENDED
                if descriptor == self._number:
                    return self._handle_message(child)
                stream = streams[descriptor]
                if stream.read(descriptor) == 0:
                    self._poll.unregister(descriptor)
                    del streams[descriptor]
                if stream.total_bytes > call.output_bytes:
                    return _end(child, wire.OUTPUT)

    def _cpu_of_tree(self, clock: int) -> float:
        used = _cpu_of_everybody(clock)
        return used if self._group is None else max(used, self._group.cpu_s())

    def _handle_message(self, child: int) -> int:
        """Handle a message that ends the call: the pool sends no other during a call. Exits if the pool is gone."""
        received = self._channel.recv(wire.CALL_BYTES)
        _end(child, wire.CANCELLED)
        if not received:
            os._exit(0)
        return wire.THREADS if received[0] == wire.CROWDED else wire.CANCELLED


def read_rest(streams: dict[int, Stream], output_bytes: int) -> None:
    """Read the rest from the pipes of an ended program, with a limit: its child processes may still write."""
    for pipe, stream in streams.items():
        while stream.total_bytes <= output_bytes + CHUNK and stream.read(pipe):
            pass


def end_group(leader: int) -> None:
    """End the processes of a program without a jail, except those that left its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_everybody(beat: Callable[[], None]) -> float:
    """End all other processes of this pid namespace; returns the CPU seconds they used."""
    assert os.getpid() == 1
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    cpu_s = 0.0
    end = time.monotonic() + GONE_S
    next_beat = time.monotonic() + BEAT_S
    while True:
        try:
            ended, _, usage = os.wait4(-1, os.WNOHANG if time.monotonic() < end else 0)
        except ChildProcessError:
            return cpu_s
        cpu_s += usage.ru_utime + usage.ru_stime
        if not ended:
            time.sleep(0.001)
            if time.monotonic() >= next_beat:
                beat()
                next_beat += BEAT_S


def _end(child: int, reason: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return reason


def _cpu_of_everybody(clock: int) -> float:
    """CPU seconds of the program on `clock` and of all other processes of this pid namespace, as far as known.

    Those of children that were never waited for are missing; the wall time bounds them, as the tree has one core.
    """
    ticks = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc/1") else ():  # noqa: PTH112, PTH208
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
                ticks += sum(map(int, stat.read().rsplit(b")", 1)[1].split()[11:15]))
    return max(ticks / _TICKS_PER_S, _cpu_used(clock))


def _cpu_used(clock: int) -> float:
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0  # it has just ended
