import numpy as np
import pytest

from actors.weights.buckets import ROW_WORDS, WeightBucket, checksum, sum_of_bytes
from tests.actors.unpacked import NamedArray, pack, unpack


def parameters() -> list[NamedArray]:
    rng = np.random.default_rng(0)
    return [
        NamedArray("embed", rng.standard_normal((7, 5)).astype(np.float32)),
        NamedArray("scale", np.array(3.0, np.float32)),
        NamedArray("norm", rng.integers(0, 2**16, 9).astype(np.uint16), "bfloat16"),
        NamedArray("empty", np.zeros((0, 4), np.float32)),
        NamedArray("head", rng.standard_normal((5, 7)).T.astype(np.float16)),
    ]


@pytest.mark.parametrize("max_bytes", [1, 64, 150, 200, 10**9])
def test_unpacking_gives_back_every_parameter_in_order_whatever_the_bucket_size(max_bytes: int):
    back = list(unpack(pack(parameters(), max_bytes)))
    assert [p.name for p in back] == [p.name for p in parameters()]
    for got, want in zip(back, parameters(), strict=True):
        assert got.dtype_name == want.dtype_name
        np.testing.assert_array_equal(got.array, want.array)


def test_the_checksum_does_not_depend_on_where_buckets_end():
    assert len({checksum(pack(parameters(), max_bytes)) for max_bytes in (1, 150, 10**9)}) == 1


def test_the_checksum_sees_one_flipped_bit_a_renamed_and_a_swapped_parameter():
    whole = checksum(pack(parameters(), 2**20))
    (bucket,) = pack(parameters(), 2**20)
    data = bucket.data.copy()
    data[bucket.entries[2].offset_bytes] ^= 1
    first, *rest = parameters()
    assert checksum([WeightBucket(bucket.entries, data)]) != whole
    assert checksum(pack([NamedArray("other", first.array), *rest], 2**20)) != whole
    assert checksum(pack([*rest, first], 2**20)) != whole


@pytest.mark.parametrize("size", [0, 1, 7, 8, 8191, 8192, 8193, 50_001])
def test_the_sum_of_bytes_counts_every_row_and_column_an_odd_number_of_times(size: int):
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    by_row = by_column = 0
    for place in range(0, size, 8):
        row, column = divmod(place // 8, ROW_WORDS)
        word = int.from_bytes(data[place : place + 8].tobytes(), "little")
        by_row, by_column = by_row + (2 * row + 1) * word, by_column + (2 * column + 1) * word
    assert sum_of_bytes(data) == (by_row + size) % 2**64 * 2**64 + by_column % 2**64


@pytest.mark.parametrize("bit", range(64))
def test_a_flipped_bit_always_changes_the_sums_of_bytes(bit: int):
    """The highest above all: they are the signs of weights."""
    data = np.random.default_rng(bit).integers(0, 2**64, 2 * ROW_WORDS + 5, dtype=np.uint64)
    whole = sum_of_bytes(data.view(np.uint8))
    for place in (0, 1, 2, ROW_WORDS, ROW_WORDS + 1, len(data) - 1):
        flipped = data.copy()
        flipped[place] ^= np.uint64(1 << bit)
        assert sum_of_bytes(flipped.view(np.uint8)) != whole


def test_two_words_that_change_places_anywhere_change_the_sum():
    data = np.arange(3 * ROW_WORDS, dtype=np.uint64)
    whole = sum_of_bytes(data.view(np.uint8))
    for one, other in ((0, 1), (5, ROW_WORDS + 5), (7, 2 * ROW_WORDS + 9)):
        swapped = data.copy()
        swapped[[one, other]] = data[[other, one]]
        assert sum_of_bytes(swapped.view(np.uint8)) != whole
