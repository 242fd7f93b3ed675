"""Weights in shared memory on their way to an engine's workers: no vLLM here."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from actors.weights import shared_memory
from actors.weights.buckets import WeightBucket, checksum
from actors.weights.shared_memory import open_buckets, shared_buckets
from rstar_ray.errors import DeadlineExceeded
from tests.actors.unpacked import NamedArray, pack, unpack

HOLDING = """
import sys, time
from pathlib import Path
from actors.weights.buckets import WeightBucket, WeightEntry
from actors.weights.shared_memory import shared_buckets
import numpy as np
bucket = WeightBucket((WeightEntry("a", (9,), "uint8", 0),), np.zeros(9, np.uint8))
with shared_buckets("old", [bucket], folder=Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def parameters() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    return {"a.weight": draw((3, 5)).astype(np.float32), "b": draw(7), "c.weight": draw((2000, 3)).astype(np.float16)}


def buckets() -> list[WeightBucket]:
    return list(pack((NamedArray(name, array) for name, array in parameters().items()), max_bytes=4096))


PLAN = [bucket.entries for bucket in buckets()]


def test_shared_weights_come_out_as_they_went_in(tmp_path: Path):
    with shared_buckets("one", buckets(), folder=tmp_path) as shared:
        received = open_buckets(shared.path, PLAN)
        assert checksum(received) == checksum(buckets())
        for parameter in unpack(received):
            np.testing.assert_array_equal(parameter.array, parameters()[parameter.name])


def test_eight_at_once_lay_out_once_and_nothing_is_left(tmp_path: Path):
    together = threading.Barrier(8)

    def take(_: int) -> tuple[bool, int]:
        together.wait()
        with shared_buckets("version", buckets(), folder=tmp_path) as shared:
            seen = checksum(open_buckets(shared.path, PLAN))
            together.wait()  # nobody leaves before all are here
        return shared.laid_out, seen

    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(take, range(8)))
    assert sum(laid_out for laid_out, _ in taken) == 1
    assert {seen for _, seen in taken} == {checksum(buckets())}
    assert not list(tmp_path.iterdir())


def test_what_a_killed_engine_left_behind_is_removed_by_the_next(tmp_path: Path):
    holding = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holding.stdout is not None and holding.stdout.readline() == "held\n"
    (old,) = tmp_path.iterdir()
    with shared_buckets("new", buckets(), folder=tmp_path):
        assert old.exists()  # its holder lives
    holding.kill()
    holding.wait()
    holding.stdout.close()
    with shared_buckets("new", buckets(), folder=tmp_path) as shared:
        assert [path.name for path in tmp_path.iterdir()] == [Path(shared.path).name]


def test_a_file_that_is_only_half_laid_out_is_laid_out_again(tmp_path: Path):
    with shared_buckets("one", buckets(), folder=tmp_path) as shared:
        name = Path(shared.path)
    name.write_bytes(b"half")
    with shared_buckets("one", buckets(), folder=tmp_path) as shared:
        assert shared.laid_out and checksum(open_buckets(shared.path, PLAN)) == checksum(buckets())


def test_who_lays_out_for_ever_is_not_waited_for_that_long(tmp_path: Path):
    import fcntl

    with shared_buckets("one", buckets(), folder=tmp_path) as shared:
        name = Path(shared.path)
    with name.open("wb") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        with (
            pytest.raises(DeadlineExceeded, match="laying out"),
            shared_buckets("one", buckets(), folder=tmp_path, deadline_s=0.02),
        ):
            pass


def test_weights_that_do_not_fit_into_shared_memory_take_the_disk_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(shared_memory, "TEMPORARY", tmp_path)
    with shared_buckets("one", buckets()) as shared:
        assert Path(shared.path).parent == tmp_path
    assert len(logged) == 1 and "shared memory has 0.0 GB free" in logged[0] and "--shm-size" in logged[0]


def test_what_a_killed_engine_left_in_shared_memory_is_removed_before_its_room_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("SHARED_MEMORY", "TEMPORARY"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(shared_memory, name, tmp_path / name)
    left = tmp_path / "SHARED_MEMORY" / f"rstar-weights-{os.geteuid()}-old"
    left.write_bytes(b"x")

    class Room:
        def __init__(self, _: Path) -> None:
            self.free = 0 if left.exists() else 10**9

    monkeypatch.setattr(shared_memory.shutil, "disk_usage", Room)
    with shared_buckets("new", buckets()) as shared:
        assert Path(shared.path).parent == tmp_path / "SHARED_MEMORY"
    assert not left.exists()


def test_another_user_cannot_read_them(tmp_path: Path):
    with shared_buckets("one", buckets(), folder=tmp_path) as shared:
        assert Path(shared.path).stat().st_mode & 0o777 == 0o600


def test_a_file_that_another_user_put_there_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with shared_buckets("one", buckets(), folder=tmp_path) as shared:
        file = Path(shared.path)
    file.write_bytes(b"")
    monkeypatch.setattr(shared_memory, "_owner", lambda _: 1 + os.geteuid())
    with pytest.raises(PermissionError, match="another user"), shared_buckets("one", buckets(), folder=tmp_path):
        pass
    assert file.read_bytes() == b""
