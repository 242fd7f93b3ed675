"""A cell: a caged process that runs one program after another, each in a fork of itself.

Nothing of a program stays: code and output pass through buffers that are wiped, never through
Python objects that a later fork could find in freed memory.
"""

import array
import gc
import mmap
import os
import resource
import select
import signal
import socket
import time

from sandbox import kernel, program, wire
from sandbox.cage import Cage
from sandbox.cut import CONTINUATION
from sandbox.seccomp import Filter, program_filter

FIRST_LOOK_S = 0.01  # most programs are over by then, and their output waits in the pipes
BEAT_S = 0.25
CHUNK = 64 * 1024
MAX_INLINE_BYTES = 192 * 1024  # longer code and input come in files
MAX_INLINE_STDIN = 48 * 1024  # fits a pipe without a reader
MAX_LEFT_FILES = 2000
CORES = os.cpu_count() or 1


class Stream:
    """The first and last bytes of one of a program's streams, in a buffer that can be wiped."""

    def __init__(self) -> None:
        self._buffer = bytearray(CHUNK)
        self._view = memoryview(self._buffer)
        self._zeros = bytes(CHUNK)
        self.reset(0, 0)

    def reset(self, head: int, tail: int) -> None:
        """Make room for a program's output: `head` and `tail` bytes are kept for sure."""
        room = head + tail + CHUNK
        if room > len(self._buffer):
            self._buffer = bytearray(room)
            self._view = memoryview(self._buffer)
            self._zeros = bytes(room)
        self._head, self._tail = head, tail
        self._filled = 0
        self.total_bytes = 0
        self._dropped_chars = 0
        self.dropped = False

    def read(self, descriptor: int) -> int:
        """Read once; returns the number of bytes, 0 at the end of the stream."""
        if len(self._buffer) - self._filled < CHUNK // 2:
            self._drop_middle()
        got = os.readv(descriptor, [self._view[self._filled :]])
        self._filled += got
        self.total_bytes += got
        return got

    def _drop_middle(self) -> None:
        end = self._filled - self._tail
        self._dropped_chars += _count_chars(self._buffer, self._head, end)
        self._view[self._head : self._head + self._tail] = self._view[end : self._filled]
        self._filled = self._head + self._tail
        self.dropped = True

    def kept(self) -> tuple[memoryview, memoryview, int]:
        """Head, tail (empty unless something was dropped), and characters on the whole stream (0: count them)."""
        if self._filled > self._head + self._tail:
            self._drop_middle()
        if not self.dropped:
            return self._view[: self._filled], self._view[:0], 0
        chars = self._dropped_chars + _count_chars(self._buffer, 0, self._filled)
        return self._view[: self._head], self._view[self._head : self._filled], chars

    def wipe(self) -> None:
        """Leave nothing of the output behind."""
        used = len(self._buffer) if self.dropped else self._filled
        self._view[:used] = self._zeros[:used]


def _count_chars(buffer: bytearray, start: int, end: int) -> int:
    part = buffer[start:end]
    starts = part.translate(None, CONTINUATION)
    count = len(starts)
    part[:] = bytes(len(part))
    starts[:] = bytes(count)
    return count


class Cell:
    """The loop of one cell over its channel to the pool."""

    def __init__(self, channel: socket.socket, cage: Cage, warmth: program.Warmth, space: int, *, caged: bool) -> None:
        self._channel = channel
        self._cage = cage
        self._warmth = warmth
        self._caged = caged
        self._space = space
        self._inbox = bytearray(wire.CALL_BYTES + MAX_INLINE_BYTES)
        self._view = memoryview(self._inbox)
        self._shared = mmap.mmap(-1, program.SHARED_BYTES)
        self._out, self._err = Stream(), Stream()
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._filters: dict[bool, Filter | None] = {
            allowed: program_filter(processes_allowed=allowed, signals_to_others=cage.first_process) if caged else None
            for allowed in (False, True)
        }

    def serve(self) -> None:
        """Answer the pool until it closes the channel."""
        while True:
            files = self._receive()
            if files is None:
                return
            call = wire.unpack_call(self._inbox)
            if call.kind == wire.PING:
                self._channel.sendall(wire.reply(wire.PONG))
            elif call.kind == wire.CALL and not self._receive_payload(call):
                return
            elif call.kind == wire.CALL:
                self._answer(call, files)

    def _receive(self) -> list[int] | None:
        """Read one header and the descriptors that came with it; None when the pool is gone."""
        files: list[int] = []
        filled = 0
        while filled < wire.CALL_BYTES:
            got, ancillary, _, _ = self._channel.recvmsg_into(
                [self._view[filled : wire.CALL_BYTES]], socket.CMSG_SPACE(8)
            )
            if got == 0:
                return None
            for _, _, data in ancillary:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) // 4 * 4])
                files += numbers
            filled += got
        return files

    def _receive_payload(self, call: wire.Call) -> bool:
        self._used = wire.CALL_BYTES
        if not call.flags & wire.CODE_IN_FD:
            self._used += call.code_bytes
        if not call.flags & wire.STDIN_IN_FD:
            self._used += call.stdin_bytes
        filled = wire.CALL_BYTES
        while filled < self._used:
            got = self._channel.recv_into(self._view[filled : self._used])
            if got == 0:
                return False
            filled += got
        return True

    def _answer(self, call: wire.Call, files: list[int]) -> None:
        self._out.reset(call.out_head, call.out_tail)
        self._err.reset(call.err_head, call.err_tail)
        pending = list(files)
        code_file = pending.pop(0) if call.flags & wire.CODE_IN_FD else -1
        stdin_file = pending.pop(0) if call.flags & wire.STDIN_IN_FD else self._small_stdin(call)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        started = time.monotonic()
        child = kernel.lean_fork()
        if child == 0:
            self._become_program(call, code_file, stdin_file, out_write, err_write)
        os.close(out_write)
        os.close(err_write)
        os.close(stdin_file)
        if code_file >= 0:
            os.close(code_file)
        handle = os.pidfd_open(child)
        watch = _Watch(self, call, child, handle, (out_read, err_read), started)
        try:
            ended_for = watch.until_the_end()
        finally:
            os.close(handle)
        _, status, usage = os.wait4(child, 0)
        wall_s = time.monotonic() - started
        if self._cage.first_process and call.flags & wire.PROCESSES_ALLOWED:
            cpu_of_others = _end_everybody()
        else:
            cpu_of_others = 0.0
            if not self._caged:
                _end_group(child)
        ended_for = watch.drain() or ended_for
        os.close(out_read)
        os.close(err_read)
        retire = not leave_empty(self._cage.home)
        cpu_s = usage.ru_utime + usage.ru_stime + cpu_of_others
        self._report(call, status, ended_for, retire, wall_s, cpu_s, usage.ru_maxrss * 1024)

    def _small_stdin(self, call: wire.Call) -> int:
        """A descriptor that gives the input of the call and then ends."""
        if call.stdin_bytes == 0:
            return os.open("/dev/null", os.O_RDONLY)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.write(writer, self._view[self._used - call.stdin_bytes : self._used])
        os.close(writer)
        return reader

    def _become_program(self, call: wire.Call, code_file: int, stdin_file: int, out: int, err: int) -> None:
        try:
            if code_file >= 0:
                with open(code_file, "rb", closefd=False) as source:
                    code = source.read()
            else:
                code = bytes(self._view[wire.CALL_BYTES : wire.CALL_BYTES + call.code_bytes])
            os.dup2(stdin_file, 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.closerange(3, 256)
            if not self._caged:
                os.setpgid(0, 0)
            cage_filter = self._filters[bool(call.flags & wire.PROCESSES_ALLOWED)]
            program.run(code, call, self._shared, self._warmth, cage_filter, self._space)
        finally:
            os._exit(71)

    def _report(
        self, call: wire.Call, status: int, ended_for: int, retire: bool, wall_s: float, cpu_s: float, peak: int
    ) -> None:
        value_bytes, flags = program.SHARED_HEADER.unpack_from(self._shared)
        value_bytes = min(value_bytes, program.SHARED_BYTES - program.SHARED_HEADER.size)
        start = program.SHARED_HEADER.size
        value = memoryview(self._shared)[start : start + value_bytes]
        out_head, out_tail, out_chars = self._out.kept()
        err_head, err_tail, err_chars = self._err.kept()
        head = wire.Result(
            call_id=call.call_id,
            wait_status=status,
            ended_for=ended_for,
            flags=(flags & wire.MEMORY_ERROR) | (wire.RETIRE if retire else 0),
            value_cut=flags >> 1,
            wall_s=wall_s,
            cpu_s=cpu_s,
            peak_memory_bytes=peak,
            out_bytes=self._out.total_bytes,
            out_chars=out_chars,
            err_bytes=self._err.total_bytes,
            err_chars=err_chars,
            out_head=len(out_head),
            out_tail=len(out_tail),
            err_head=len(err_head),
            err_tail=len(err_tail),
            value=value_bytes,
        ).pack()
        parts = [out_head, out_tail, err_head, err_tail, value]
        length = len(head) + sum(len(part) for part in parts)
        front = wire.reply_header(wire.RESULT, length) + head
        total = len(front) + length - len(head)
        if self._channel.sendmsg([front, *parts]) < total:
            raise OSError("a blocking send was cut short")
        if value_bytes or flags:
            self._shared[: start + value_bytes] = bytes(start + value_bytes)
        value.release()
        self._out.wipe()
        self._err.wipe()
        self._view[: self._used] = bytes(self._used)


class _Watch:
    """Waits for one program's end, reading its output and holding it to its limits."""

    def __init__(
        self, cell: Cell, call: wire.Call, child: int, handle: int, pipes: tuple[int, int], started: float
    ) -> None:
        self._cell = cell
        self._call = call
        self._child = child
        self._handle = handle
        self._open = dict(zip(pipes, (cell._out, cell._err), strict=True))
        self._started = started
        self._cpu_clock = (~child << 3) | 2  # the CPU clock of a process, see clock_getcpuclockid(3)

    def until_the_end(self) -> int:
        """Return why the program was ended, or NOT_ENDED once it ended by itself."""
        poll = self._cell._poll
        poll.register(self._handle, select.POLLIN)
        try:
            ready = poll.poll(min(FIRST_LOOK_S, self._call.wall_s) * 1000)
            if ready == [(self._handle, select.POLLIN)]:
                return wire.NOT_ENDED
            for pipe in self._open:
                poll.register(pipe, select.POLLIN)
            return self._wait(poll)
        finally:
            poll.unregister(self._handle)
            for pipe in self._open:
                try:
                    poll.unregister(pipe)
                except KeyError:
                    pass

    def _wait(self, poll: select.poll) -> int:
        channel = self._cell._channel
        next_beat = self._started + BEAT_S
        while True:
            now = time.monotonic()
            if now >= next_beat:
                channel.sendall(wire.reply(wire.BEAT))
                next_beat = now + BEAT_S
                if not self._cell._cage.first_process and too_much_in(self._cell._cage.home):
                    return self._end(wire.STORAGE)
            wall_left = self._call.wall_s - (now - self._started)
            cpu_left = self._call.cpu_s - self._cpu_used()
            if cpu_left <= 0:
                return self._end(wire.CPU_TIME)
            if wall_left <= 0:
                return self._end(wire.WALL_TIME)
            # Threads outside the interpreter lock may use several cores at once.
            wait_s = min(wall_left, max(cpu_left / CORES, 0.005), next_beat - now)
            for descriptor, _ in poll.poll(max(wait_s, 0) * 1000 + 0.5):
                if descriptor == self._handle:
                    return wire.NOT_ENDED
                if descriptor == channel.fileno():
                    self._hear()
                    return self._end(wire.CANCELLED)
                if not self._read(poll, descriptor):
                    return self._end(wire.OUTPUT)

    def _read(self, poll: select.poll, descriptor: int) -> bool:
        """Read from one pipe; False once the program has printed too much."""
        stream = self._open[descriptor]
        if stream.read(descriptor) == 0:
            poll.unregister(descriptor)
            del self._open[descriptor]
        return stream.total_bytes <= self._call.output_bytes

    def _hear(self) -> None:
        """The pool speaks during a call only to cancel it; without a pool there is nobody to answer."""
        if self._cell._channel.recv_into(self._cell._view[: wire.CALL_BYTES]) == 0:
            self._end(wire.CANCELLED)
            os._exit(0)

    def _cpu_used(self) -> float:
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:
            return 0.0  # it has just ended

    def _end(self, reason: int) -> int:
        try:
            os.kill(self._child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return reason

    def drain(self) -> int:
        """Read what is left in the pipes of a dead program; OUTPUT if that was too much."""
        waiting = select.poll()
        for pipe in self._open:
            waiting.register(pipe, select.POLLIN)
        while self._open:
            ready = [(pipe, event) for pipe, event in waiting.poll(0)]
            if not ready:
                break  # a descendant elsewhere holds the pipe; it is dead or dying
            for pipe, _ in ready:
                stream = self._open[pipe]
                if stream.read(pipe) == 0 or stream.total_bytes > self._call.output_bytes + CHUNK:
                    waiting.unregister(pipe)
                    del self._open[pipe]
        return wire.NOT_ENDED


def _end_group(leader: int) -> None:
    """End what a program without a cage started, as far as it stayed in its group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _end_everybody() -> float:
    """End all other processes of this pid namespace; returns the CPU seconds they used."""
    assert os.getpid() == 1
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    cpu_s = 0.0
    while True:
        try:
            _, _, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return cpu_s
        cpu_s += usage.ru_utime + usage.ru_stime


def too_much_in(home: str) -> bool:
    """True where a program without a file system of its own leaves more than it may."""
    count, blocks = 0, 0
    folders = [home]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    blocks += entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if count > MAX_LEFT_FILES * 2 or blocks * 512 > (64 << 20):
                        return True
    except OSError:
        return count > MAX_LEFT_FILES  # it changes under us; the next look decides
    return False


def leave_empty(home: str) -> bool:
    """Empty the working folder; False where that is too much work and the cell had better end.

    Never recursive, never follows a link: folders are moved up and emptied one level at a time.
    """
    try:
        os.chmod(home, 0o700)
        names = os.listdir(home)
        removed = 0
        while names:
            for number, name in enumerate(names):
                path = f"{home}/{name}"
                try:
                    os.unlink(path)
                except IsADirectoryError:
                    os.chmod(path, 0o700)
                    for inner, below in enumerate(os.listdir(path)):
                        inside = f"{path}/{below}"
                        if os.path.isdir(inside) and not os.path.islink(inside):
                            os.chmod(inside, 0o700)
                            os.rename(inside, f"{home}/.up-{removed}-{number}-{inner}")
                        else:
                            os.unlink(inside)
                        removed += 1
                    os.rmdir(path)
                removed += 1
                if removed > MAX_LEFT_FILES * 4:
                    return False
            names = os.listdir(home)
    except OSError:
        return False
    return True


def address_space_bytes() -> int:
    """Virtual size of this process; needs a /proc, so ask before entering the cage."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def main(channel: socket.socket, cage: Cage, warmth: program.Warmth, space: int, *, caged: bool) -> None:
    """Serve until the pool lets go, then end this process."""
    try:
        os.environ.update(HOME=cage.home, TMPDIR=cage.home)
        cell = Cell(channel, cage, warmth, space, caged=caged)
        gc.collect()
        gc.freeze()
        cell.serve()
    finally:
        os._exit(0)
