"""Folders for temporary files: gone with their owner, or with the next one's beginning."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.temporary_folder import LOCK, LockedFolder, sweep

HELD = (
    "import sys, time; "
    "from rstar_ray.temporary_folder import LockedFolder; f = LockedFolder('kind-', parent=sys.argv[1])"
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_goes_with_all_that_is_in_it(tmp_path: Path):
    folder = LockedFolder("kind-", parent=str(tmp_path))
    (folder.path / "deep").mkdir()
    (folder.path / "deep" / "file").write_text("x")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert names(tmp_path) == []


def test_what_a_killed_owner_left_is_cleared_by_the_next_and_a_living_owners_stays(tmp_path: Path):
    code = f"{HELD}; print(f.path.name, flush=True); time.sleep(600)"
    owners = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        living, dead = (owner.stdout.readline().strip() for owner in owners if owner.stdout is not None)
        (tmp_path / dead / "file").write_text("x")
        for odd in ("kind-just-made", "kind-of-nobody", "another-kind"):
            (tmp_path / odd).mkdir()
        (tmp_path / "kind-just-made" / f"{LOCK}-new").touch()
        (tmp_path / "another-kind" / LOCK).touch()
        owners[1].kill()
        owners[1].wait()
        mine = LockedFolder("kind-", parent=str(tmp_path))
        assert names(tmp_path) == sorted([living, mine.path.name, "kind-just-made", "kind-of-nobody", "another-kind"])
        mine.remove()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            assert owner.stdout is not None
            owner.stdout.close()
    LockedFolder("kind-", parent=str(tmp_path)).remove()
    assert names(tmp_path) == ["another-kind", "kind-just-made", "kind-of-nobody"]


def test_two_of_one_process_do_not_take_each_other_for_dead(tmp_path: Path):
    first = LockedFolder("kind-", parent=str(tmp_path))
    second = LockedFolder("kind-", parent=str(tmp_path))
    assert first.path.is_dir() and second.path.is_dir()
    first.remove()
    second.remove()


class Killed(BaseException):
    """What no handler of a fault takes for one."""


def test_a_clearing_that_is_killed_half_way_is_continued_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dead = LockedFolder("kind-", parent=str(tmp_path))
    for name in ("first", "second"):
        (dead.path / name).write_text("x")
    os.close(dead._lock)
    scandir, unlink, unlinked = os.scandir, os.unlink, []

    @contextmanager
    def in_order(folder: Any) -> Iterator[list[Any]]:  # of names: the lock's is the first
        with scandir(folder) as entries:
            yield sorted(entries, key=lambda entry: entry.name)

    def until_killed(path: Any, *, dir_fd: int | None = None) -> None:
        if unlinked:
            raise Killed
        unlinked.append(path)
        unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(os, "scandir", in_order)
        patched.setattr(os, "unlink", until_killed)
        sweep(tmp_path, "kind-")
    assert dead.path.is_dir()
    sweep(tmp_path, "kind-")
    assert names(tmp_path) == []
