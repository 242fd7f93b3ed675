"""Messages between a pool and its workers: fixed binary headers, then raw bytes.

Imported by the warm server, so it needs nothing but `struct`. The pool sends CALL, CANCEL, CROWDED
and PING; a worker answers with HELLO, BEAT, PONG and RESULT.
"""

import struct
from typing import NamedTuple

CALL, CANCEL, PING, CROWDED = 1, 2, 3, 4
SERVER_PING = b"?"  # to a warm server, whose orders are JSON objects
HELLO, BEAT, PONG, RESULT, FAILED = 11, 12, 13, 14, 15

# Flags of a CALL.
CODE_IN_FD, STDIN_IN_FD, PROCESSES_ALLOWED = 1, 2, 4
# Why a worker ended a program.
NOT_ENDED, CPU_TIME, WALL_TIME, OUTPUT, STORAGE, CANCELLED, THREADS = range(7)
# Flags of a RESULT.
MEMORY_ERROR, RETIRE = 1, 2

_CALL = struct.Struct("<BBxxxxxxQddQQqQQIIII")
CALL_BYTES = _CALL.size
_REPLY = struct.Struct("<BxxxI")
REPLY_BYTES = _REPLY.size
_RESULT = struct.Struct("<QiBBxxIddQQQQIIIII")
RESULT_BYTES = _RESULT.size


class CallHeader(NamedTuple):
    """One program for a worker; the header's `code_bytes` and `stdin_bytes` follow inline or in a file."""

    kind: int
    flags: int
    call_id: int
    wall_s: float
    cpu_s: float
    memory_bytes: int  # address space on top of the warm interpreter
    output_bytes: int
    seed: int  # -1: from the kernel's entropy
    code_bytes: int
    stdin_bytes: int
    out_head: int  # bytes to retain of the beginning of stdout
    out_tail: int
    err_head: int
    err_tail: int

    def pack(self) -> bytes:
        return _CALL.pack(*self)


def bare(kind: int) -> bytes:
    """A CALL-sized header without a program: PING, CANCEL or CROWDED."""
    return CallHeader(kind, 0, 0, 0.0, 0.0, 0, 0, -1, 0, 0, 0, 0, 0, 0).pack()


def unpack_call(data: bytes | bytearray | memoryview) -> CallHeader:
    return CallHeader._make(_CALL.unpack_from(data))


def reply_header(kind: int, length: int) -> bytes:
    return _REPLY.pack(kind, length)


def reply(kind: int, payload: bytes = b"") -> bytes:
    return _REPLY.pack(kind, len(payload)) + payload


def unpack_reply(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the kind and the length of what follows."""
    kind, length = _REPLY.unpack_from(data)
    return kind, length


class Result(NamedTuple):
    """A worker's observations; five byte strings follow: stdout head, tail, stderr head, tail, value."""

    call_id: int
    wait_status: int
    ended_for: int
    flags: int
    value_cut: int
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    out_bytes: int
    out_chars: int
    err_chars: int
    out_head: int
    out_tail: int
    err_head: int
    err_tail: int
    value: int

    def pack(self) -> bytes:
        return _RESULT.pack(*self)


def unpack_result(data: bytes | bytearray | memoryview) -> Result:
    return Result._make(_RESULT.unpack_from(data))
