"""Weights in shared memory on their way to an engine's workers: no vLLM here."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.weights.buckets import NamedArray, WeightBucket, checksum, pack, unpack
from actors.weights.staging import from_payload, open_buckets, refuse_other_parameters, stage
from rstar_ray.errors import EngineError


def parameters() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    return {"a.weight": draw((3, 5)).astype(np.float32), "b": draw(7), "c.weight": draw((2000, 3)).astype(np.float16)}


def buckets() -> list[WeightBucket]:
    return list(pack((NamedArray(name, array) for name, array in parameters().items()), max_bytes=4096))


def test_staged_weights_come_out_as_they_went_in():
    with stage(buckets()) as staged:
        received = open_buckets(from_payload(**staged.payload()))
        assert checksum(received) == checksum(buckets())
        for parameter in unpack(received):
            np.testing.assert_array_equal(parameter.array, parameters()[parameter.name])


def test_a_readers_change_reaches_nobody_else():
    with stage(buckets()) as staged:
        open_buckets(staged)[0].data[:] = 0
        assert checksum(open_buckets(staged)) == checksum(buckets())


def test_the_staged_file_is_gone_afterwards_and_a_readers_view_lives_on():
    with stage(buckets()) as staged:
        received = open_buckets(staged)
    assert not Path(staged.path).exists()
    assert checksum(received) == checksum(buckets())


def test_other_parameters_than_the_model_folders_are_named_and_refused(tmp_path: Path):
    saved = parameters() | {"b": np.zeros(8), "d": np.zeros(1)}
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"missing \['d'\], unknown \[\], of another shape \['b'\]"):
        refuse_other_parameters(tmp_path, buckets())


def test_the_model_folders_own_parameters_pass(tmp_path: Path):
    save_file(parameters(), tmp_path / "model.safetensors")
    refuse_other_parameters(tmp_path, buckets())
