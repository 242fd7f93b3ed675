"""A worker: an isolated process that runs one program after another, each in a fork of itself.

No data of a program remains: code and output pass through buffers that are wiped, never through Python objects that a
later fork could find in freed memory. A worker whose working folder has changed runs no further program. The worker's
own memory retains only numbers of a call: sizes, times, a status.
"""

import array
import gc
import mmap
import os
import resource
import socket
import time
from pathlib import Path

from sandbox.jail import kernel, program, wire
from sandbox.jail.build import Jail
from sandbox.jail.limit_watch import Watch, end_everybody, end_group, read_rest
from sandbox.jail.scratch import first_stamp, stamp
from sandbox.jail.seccomp import Filter, Reach, program_filter
from sandbox.jail.stream import Stream, open_pipe

MAX_INLINE_BYTES = 64 * 1024  # longer code and input arrive in files
MAX_DESCRIPTORS = 256
MAX_GROWTH_BYTES = 96 * 1024 * 1024  # of the worker itself; then it asks to be replaced


class Worker:
    """The loop of one worker over its channel to the pool."""

    def __init__(
        self, channel: socket.socket, jail: Jail, warmth: program.Warmth, space: int, *, isolated: bool
    ) -> None:
        self._channel = channel
        self._jail = jail
        self._warmth = warmth
        self._isolated = isolated
        self._space = space
        self._inbox = bytearray(wire.CALL_BYTES + MAX_INLINE_BYTES)
        self._view = memoryview(self._inbox)
        self._used = 0  # bytes of the inbox that the current call uses
        self._shared = mmap.mmap(-1, program.SHARED_BYTES)
        self._out, self._err = Stream(), Stream()
        self._watch = Watch(channel, "" if jail.first_process else jail.home, jail.group)
        self._peak_at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        alone = jail.first_process
        own_uid = alone or bool(jail.facts.get("own_uid"))
        self._filters: dict[bool, Filter | None] = {
            allowed: program_filter(Reach(allowed, own_pids=alone, own_uid=own_uid, own_files=alone))
            if isolated
            else None
            for allowed in (False, True)
        }
        self._cores = sorted(os.sched_getaffinity(0))
        self._untouched = first_stamp(jail.home)

    def serve(self) -> None:
        """Answer the pool until it closes the channel."""
        while True:
            files = self._receive()
            if files is None:
                return
            call = wire.unpack_call(self._inbox)
            if call.kind == wire.PING:
                self._channel.sendall(wire.reply(wire.PONG))
            elif call.kind == wire.CALL:
                if not self._receive_payload(call):
                    return
                self._answer(call, files)

    def _receive(self) -> list[int] | None:
        """Read one header and the descriptors that came with it; None if the pool has closed the channel."""
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

    def _receive_payload(self, call: wire.CallHeader) -> bool:
        self._used = wire.CALL_BYTES
        self._used += 0 if call.flags & wire.CODE_IN_FD else call.code_bytes
        self._used += 0 if call.flags & wire.STDIN_IN_FD else call.stdin_bytes
        filled = wire.CALL_BYTES
        while filled < self._used:
            got = self._channel.recv_into(self._view[filled : self._used])
            if got == 0:
                return False
            filled += got
        return True

    def _answer(self, call: wire.CallHeader, files: list[int]) -> None:
        """Run one program from fork to result."""
        self._out.reset(call.out_head, call.out_tail)
        self._err.reset(call.err_head, call.err_tail)
        code_file = files.pop(0) if call.flags & wire.CODE_IN_FD else -1
        stdin_file = files.pop(0) if call.flags & wire.STDIN_IN_FD else self._small_stdin(call)
        out_read, out_write = open_pipe()
        err_read, err_write = open_pipe()
        if call.flags & wire.PROCESSES_ALLOWED and self._jail.group is not None:
            self._jail.group.begin()
        started = time.monotonic()
        child = kernel.lean_fork()
        if child == 0:
            self._become_program(call, code_file, stdin_file, out_write, err_write)
        if child < 0:
            raise OSError("fork")  # the pool gives the call to another worker
        handle = os.pidfd_open(child)
        for descriptor in (out_write, err_write, stdin_file, code_file):
            if descriptor >= 0:
                os.close(descriptor)
        streams = {out_read: self._out, err_read: self._err}
        ended_for = self._watch.until_the_end(call, child, handle, streams, started)
        os.close(handle)
        _, status, usage = os.wait4(child, 0)
        wall_s = time.monotonic() - started
        cpu_s = usage.ru_utime + usage.ru_stime
        has_tree = bool(call.flags & wire.PROCESSES_ALLOWED)
        had_processes = has_tree or not self._isolated
        if had_processes and self._jail.first_process:
            cpu_s += end_everybody(self._watch.beat)
        elif had_processes:
            end_group(child)
        if has_tree and self._jail.group is not None:
            cpu_s = max(cpu_s, self._jail.group.cpu_s())
        read_rest(streams, call.output_bytes)
        os.close(out_read)
        os.close(err_read)
        peak = usage.ru_maxrss * 1024
        self._report(call, status, ended_for, wall_s=wall_s, cpu_s=cpu_s, peak=peak)

    def _is_spent(self) -> bool:
        """True if a program changed the folder, or this process has grown too much."""
        return stamp(self._jail.home) != self._untouched or self._has_grown()

    def _has_grown(self) -> bool:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._peak_at_start
        return grown > MAX_GROWTH_BYTES

    def _small_stdin(self, call: wire.CallHeader) -> int:
        """A descriptor with the input of the call."""
        if call.stdin_bytes == 0:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.write(writer, self._view[self._used - call.stdin_bytes : self._used])
        os.close(writer)
        return reader

    def _become_program(self, call: wire.CallHeader, code_file: int, stdin_file: int, out: int, err: int) -> None:
        """In the child: take the program's descriptors and run it; never returns."""
        try:
            if code_file >= 0:
                code = os.pread(code_file, call.code_bytes, 0)
            else:
                code = bytes(self._view[wire.CALL_BYTES : wire.CALL_BYTES + call.code_bytes])
            if call.flags & wire.PROCESSES_ALLOWED and self._jail.group is not None:
                self._jail.group.join()
            os.dup2(stdin_file, 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.closerange(3, MAX_DESCRIPTORS)
            if not self._isolated:
                os.setpgid(0, 0)
            elif call.flags & wire.PROCESSES_ALLOWED:  # so that the tree's CPU time is at most its wall time
                os.sched_setaffinity(0, {self._cores[call.call_id % len(self._cores)]})
            jail_filter = self._filters[bool(call.flags & wire.PROCESSES_ALLOWED)]
            program.run(code, call, self._shared, self._warmth, jail_filter, self._space)
        finally:
            os._exit(program.BROKEN)

    def _report(
        self, call: wire.CallHeader, status: int, ended_for: int, *, wall_s: float, cpu_s: float, peak: int
    ) -> None:
        """Send the pool the result, and wipe it here."""
        start = program.SHARED_HEADER.size
        value_bytes, flags = program.SHARED_HEADER.unpack_from(self._shared)
        value_bytes = min(value_bytes, program.SHARED_BYTES - start)  # the program could have written anything
        value = memoryview(self._shared)[start : start + value_bytes]
        out_head, out_tail, out_chars = self._out.kept()
        err_head, err_tail, err_chars = self._err.kept()
        seen = wire.Result(
            call_id=call.call_id,
            wait_status=status,
            ended_for=ended_for,
            flags=(flags & wire.MEMORY_ERROR) | (wire.RETIRE if self._is_spent() else 0),
            value_cut=min(flags >> 1, call.memory_bytes),
            wall_s=wall_s,
            cpu_s=cpu_s,
            peak_memory_bytes=peak,
            out_bytes=self._out.total_bytes,
            out_chars=out_chars,
            err_chars=err_chars,
            out_head=len(out_head),
            out_tail=len(out_tail),
            err_head=len(err_head),
            err_tail=len(err_tail),
            value=value_bytes,
        )
        parts = [out_head, out_tail, err_head, err_tail, value]
        length = sum(len(part) for part in parts)
        front = wire.reply_header(wire.RESULT, wire.RESULT_BYTES + length) + seen.pack()
        sent = self._channel.sendmsg([front, *parts])
        if sent < len(front) + length:  # a large result, interrupted: send the rest part by part
            for part in (memoryview(front), *parts):
                if sent >= len(part):
                    sent -= len(part)
                else:
                    self._channel.sendall(part[sent:])
                    sent = 0
        value.release()
        self._shared.madvise(mmap.MADV_REMOVE)  # frees all pages that the program wrote there
        self._out.wipe()
        self._err.wipe()
        self._view[: self._used] = bytes(self._used)


def address_space_bytes() -> int:
    """Virtual size of this process; needs /proc, so call it before entering the jail."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return pages * resource.getpagesize()


def main(channel: socket.socket, jail: Jail, warmth: program.Warmth, space: int, *, isolated: bool) -> None:
    """Serve until the pool closes the channel, then end this process."""
    try:
        os.environ.update(HOME=jail.home, TMPDIR=jail.home)
        worker = Worker(channel, jail, warmth, space, isolated=isolated)
        gc.collect()
        gc.freeze()
        worker.serve()
    finally:
        os._exit(0)
