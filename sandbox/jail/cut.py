"""Cuts long output and states how much is missing."""

# Bytes 0x80 to 0xBF continue a UTF-8 character; all others begin one.
CONTINUATION = bytes(range(0x80, 0xC0))
STDOUT_HEAD_SHARE = 0.5
STDERR_HEAD_SHARE = 0.25  # a traceback ends with the error


def head_and_tail(limit: int, head_share: float) -> tuple[int, int]:
    """Split `limit` characters between the beginning and the end of a text."""
    head = int(limit * head_share)
    return head, limit - head


def cut_text(text: str, limit: int, head_share: float) -> tuple[str, int]:
    """Return the text with its middle cut to `limit` characters, and how many were cut."""
    if len(text) <= limit:
        return text, 0
    head, tail = head_and_tail(limit, head_share)
    missing = len(text) - limit
    return text[:head] + mark(missing) + (text[-tail:] if tail else ""), missing


def join_kept(head: bytes, tail: bytes, total_chars: int, limit: int, head_share: float) -> tuple[str, int]:
    """Rebuild cut text from the first and last bytes of a stream of `total_chars` characters.

    Bytes that are not UTF-8 become U+FFFD; a character split by the cut is dropped whole.
    """
    head_chars, tail_chars = head_and_tail(limit, head_share)
    front = _drop_split_end(head).decode("utf-8", "replace")[:head_chars]
    back = tail.lstrip(CONTINUATION).decode("utf-8", "replace")
    back = back[-tail_chars:] if tail_chars else ""
    missing = max(total_chars - len(front) - len(back), 1)
    return front + mark(missing) + back, missing


def mark(missing: int) -> str:
    """The text that replaces missing characters."""
    return f"\n... [{missing} characters cut] ...\n"


def _drop_split_end(data: bytes) -> bytes:
    """Drop a UTF-8 character whose last bytes are missing."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return data
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if length > back else data
    return data
