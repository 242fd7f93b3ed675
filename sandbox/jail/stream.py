"""Retains the first and last bytes of a program's output."""

import os

from sandbox.jail.cut import CONTINUATION

CHUNK = 64 * 1024


def open_pipe() -> tuple[int, int]:
    """A pipe for a program's output: its end for reading, which is non-blocking, and its end for writing.

    The program can open the first end too, and read the data that poll(2) has just reported.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)
    return reading, writing


class Stream:
    """The first and last bytes of one of a program's streams, in a buffer that can be wiped."""

    def __init__(self) -> None:
        self._buffer = bytearray(CHUNK)
        self._view = memoryview(self._buffer)
        self._zeros = bytes(CHUNK)
        self.reset(0, 0)

    def reset(self, head: int, tail: int) -> None:
        """Prepare for a program's output, of which at least `head` and `tail` bytes are retained."""
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

    def read(self, descriptor: int) -> int | None:
        """Read once; returns the number of bytes, 0 at the end of the stream, None if no data has arrived."""
        if len(self._buffer) - self._filled < CHUNK // 2:
            self._drop_middle()
        try:
            got = os.readv(descriptor, [self._view[self._filled :]])
        except BlockingIOError:
            return None
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
        """Head, tail (empty unless bytes were dropped), and characters of the whole stream (0: the caller counts)."""
        if self._filled > self._head + self._tail:
            self._drop_middle()
        if not self.dropped:
            return self._view[: self._filled], self._view[:0], 0
        chars = self._dropped_chars + _count_chars(self._buffer, 0, self._filled)
        return self._view[: self._head], self._view[self._head : self._filled], chars

    def wipe(self) -> None:
        """Overwrite all output with zeros."""
        used = len(self._buffer) if self.dropped else self._filled
        self._view[:used] = self._zeros[:used]


def _count_chars(buffer: bytearray, start: int, end: int) -> int:
    part = buffer[start:end]
    starts = part.translate(None, CONTINUATION)
    count = len(starts)
    part[:] = bytes(len(part))
    starts[:] = bytes(count)
    return count
