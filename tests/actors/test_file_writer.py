"""What is written beside the steps: when it begins, and what is said where it fails."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.learner.file_writer import FileWriter, Write


@pytest.fixture
def writer() -> Iterator[FileWriter]:
    writer = FileWriter(by="learner/rank-0")
    yield writer
    writer.close()


def writes(path: Path, done: list[str]) -> Write:
    def write() -> list[Path]:
        path.write_text("weights")
        done.append(path.name)
        return [path]

    return write


def test_nothing_is_written_while_copies_are_still_taken(tmp_path: Path, writer: FileWriter):
    done: list[str] = []
    writer.hand(writes(tmp_path / "state", done))
    writer.hand(writes(tmp_path / "model", done))
    writer._thread.submit(lambda: None).result()  # the thread has nothing before this
    assert done == []
    files = writer.written()
    assert done == ["state", "model"] and files.keys() == {tmp_path / "state", tmp_path / "model"}
    told = files[tmp_path / "state"]
    assert (told.num_bytes, told.sha256, told.by) == (7, hashlib.sha256(b"weights").hexdigest(), "learner/rank-0")
    assert writer.written() == {}


def test_it_is_written_in_another_thread(tmp_path: Path, writer: FileWriter):
    threads: list[threading.Thread] = []
    writer.hand(lambda: (threads.append(threading.current_thread()), [])[1])
    writer.written()
    assert threads and threads[0] is not threading.current_thread()


def test_what_kept_the_first_from_being_written_is_raised_once(tmp_path: Path, writer: FileWriter):
    done: list[str] = []

    def fail() -> list[Path]:
        raise OSError("no space left")

    writer.hand(fail)
    writer.hand(writes(tmp_path / "model", done))
    with pytest.raises(OSError, match="no space left"):
        writer.written()
    assert writer.written() == {}
