"""A sum over the bytes of one parameter.

Every row of words and every column of words has a sum, which counts an odd number of times, of its own. A flipped bit
changes both totals, since an odd multiple of a power of two below the modulus is never 0; they are kept apart, since
the sum of two such multiples may be, for the highest bits, which are the signs of weights. Words that change places
change one total or both, unless they differ in their highest bits alone.

Memory is read twice, at 6.9 GB a second on one core where a crc32 of the same bytes does 2.6.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8
ROW_WORDS = 1024
ROW_BYTES = ROW_WORDS * WORD_BYTES
MODULUS = 2**64


def of_array(data: NDArray[np.uint8]) -> int:
    """Of flat bytes; 128 bits."""
    whole = len(data) - len(data) % ROW_BYTES
    by_row, by_column = _of_rows(data[:whole].view(np.uint64).reshape(-1, ROW_WORDS), first=0)
    if whole < len(data):
        rest = np.zeros(ROW_BYTES, np.uint8)
        rest[: len(data) - whole] = data[whole:]
        row, column = _of_rows(rest.view(np.uint64).reshape(1, ROW_WORDS), first=whole // ROW_BYTES)
        by_row, by_column = by_row + row, by_column + column
    return joined(by_row, by_column, len(data))


def joined(by_row: int, by_column: int, num_bytes: int) -> int:
    """The figure, of the two totals (of any sign, modulo 2**64) and the number of bytes."""
    return (by_row + num_bytes) % MODULUS * MODULUS + by_column % MODULUS


def _of_rows(words: NDArray[np.uint64], first: int) -> tuple[int, int]:
    by_row = words.sum(1, dtype=np.uint64) * _odd(np.arange(first, first + len(words), dtype=np.uint64))
    by_column = words.sum(0, dtype=np.uint64) * _odd(np.arange(ROW_WORDS, dtype=np.uint64))
    return int(by_row.sum(dtype=np.uint64)), int(by_column.sum(dtype=np.uint64))


def _odd(index: Any) -> Any:
    return 2 * index + 1
