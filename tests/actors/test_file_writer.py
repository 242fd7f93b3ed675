"""What is written beside the steps: when it begins, and what is said where it fails."""

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


def test_what_kept_the_first_from_being_written_is_raised_once(tmp_path: Path, writer: FileWriter):
    done: list[str] = []

    def fail() -> list[Path]:
        raise OSError("no space left")

    writer.hand(fail)
    writer.hand(writes(tmp_path / "model", done))
    with pytest.raises(OSError, match="no space left"):
        writer.written()
    assert writer.written() == {}
