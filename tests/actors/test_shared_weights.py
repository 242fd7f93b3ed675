"""Weights in shared memory on their way to an engine's workers: no vLLM here."""

from pathlib import Path

import numpy as np

from actors.weights.buckets import NamedArray, WeightBucket, checksum, pack, unpack
from actors.weights.shared_memory import from_payload, open_buckets, share


def parameters() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    return {"a.weight": draw((3, 5)).astype(np.float32), "b": draw(7), "c.weight": draw((2000, 3)).astype(np.float16)}


def buckets() -> list[WeightBucket]:
    return list(pack((NamedArray(name, array) for name, array in parameters().items()), max_bytes=4096))


def test_shared_weights_come_out_as_they_went_in():
    with share(buckets()) as shared:
        received = open_buckets(from_payload(**shared.payload()))
        assert checksum(received) == checksum(buckets())
        for parameter in unpack(received):
            np.testing.assert_array_equal(parameter.array, parameters()[parameter.name])


def test_a_readers_change_reaches_nobody_else():
    with share(buckets()) as shared:
        open_buckets(shared)[0].data[:] = 0
        assert checksum(open_buckets(shared)) == checksum(buckets())


def test_the_shared_file_is_gone_afterwards_and_a_readers_view_lives_on():
    with share(buckets()) as shared:
        received = open_buckets(shared)
    assert not Path(shared.path).exists()
    assert checksum(received) == checksum(buckets())
