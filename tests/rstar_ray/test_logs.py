"""What a command logs: lines on the console, and everything with its tracebacks in the run directory."""

import logging
import pickle
import re
import sys
from pathlib import Path

import pytest

from actors.launch.exit_status import status_of
from rstar_ray.errors import RStarError
from rstar_ray.logs import RecordBuffer, console_logging, log_to, relay

log = logging.getLogger("rstar_ray.example")


def test_the_console_has_the_message_alone_and_the_file_time_level_and_component(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with console_logging():
        log.info("before the file")
        log_to(tmp_path / "logs" / "driver.log")
        log.warning("step %d: two rollouts dropped", 3)
    log.info("after the command")
    assert capsys.readouterr().out == "before the file\nstep 3: two rollouts dropped\n"
    (line,) = (tmp_path / "logs" / "driver.log").read_text().splitlines()
    assert re.fullmatch(r"[-\d]+ [:\d]+,\d+ WARNING driver rstar_ray.example: step 3: two rollouts dropped", line)


def test_what_ends_a_command_is_one_line_on_the_console_and_a_traceback_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def act() -> None:
        log_to(tmp_path / "driver.log")
        raise RStarError("step 3: every rollout was dropped")

    assert status_of(act) == 1
    assert capsys.readouterr().err == "error: step 3: every rollout was dropped\n"
    text = (tmp_path / "driver.log").read_text()
    assert "Traceback" in text and "in act" in text and "RStarError: step 3" in text


def test_what_an_actor_logs_reaches_the_console_and_the_file_under_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    buffer = RecordBuffer()
    log.addHandler(buffer)
    try:
        raise OSError("disk full")
    except OSError:
        log.exception("%s cannot be written", "the journal")
    finally:
        log.removeHandler(buffer)
    records = pickle.loads(pickle.dumps(buffer.take()))
    with console_logging():
        log_to(tmp_path / "driver.log")
        relay(records, "generation/1")
    assert capsys.readouterr().err == "error: generation/1: the journal cannot be written\n"
    text = (tmp_path / "driver.log").read_text()
    assert " ERROR generation/1 rstar_ray.example: the journal cannot be written\nTraceback" in text
    assert "OSError: disk full" in text and not buffer.take()


def test_a_message_that_cannot_be_formatted_is_logged_and_raises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own raises
    buffer = RecordBuffer()
    log.addHandler(buffer)
    with console_logging():
        log_to(tmp_path / "driver.log")
        log.warning("%d rollouts of %s", "three")
    log.removeHandler(buffer)
    (record,) = buffer.take()
    for text in (record.getMessage(), capsys.readouterr().out, (tmp_path / "driver.log").read_text()):
        assert "%d rollouts of %s" in text and "cannot be formatted" in text


def test_an_error_of_a_library_keeps_its_traceback_before_there_is_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    library = logging.getLogger("a_library")
    with console_logging():
        for _ in range(2):
            try:
                raise OSError("disk full")
            except OSError:
                library.exception("the cache cannot be written")
            log_to(tmp_path / "driver.log")
    said = capsys.readouterr().err
    assert said.count("error: the cache cannot be written\n") == 2 and said.count("OSError: disk full") == 1
    assert "OSError: disk full" in (tmp_path / "driver.log").read_text()


def test_a_closed_terminal_and_a_full_disk_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with console_logging():
        log_to(Path("/dev/full"))
        for _ in range(3):
            log.info("the run continues")
        log_to(tmp_path)  # a folder
        terminal = (tmp_path / "terminal").open("w")
        terminal.close()
        monkeypatch.setattr(sys, "stdout", terminal)
        log.info("nobody reads this")
    said = capsys.readouterr()
    assert said.out.startswith("the run continues\n" * 3) and "cannot be written: Is a directory" in said.out
    assert said.err == ""
