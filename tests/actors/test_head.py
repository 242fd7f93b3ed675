"""Whether Ray's head answers, with a fake in its place."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from actors.health.head import HeadProbe
from tests.processes import wait_for_end


class Head:
    def __init__(self) -> None:
        self.there = threading.Event()
        self.there.set()
        self.refuses = False

    def ask(self) -> None:
        if self.refuses:
            raise ConnectionError("refused")
        self.there.wait()


def until(holds: Callable[[], bool], probe: HeadProbe) -> bool:
    give_up_s = time.monotonic() + 60
    while not holds() and time.monotonic() < give_up_s:
        probe.look()
        time.sleep(0.01)
    return holds()


@pytest.mark.long
@pytest.mark.parametrize("refuses", [False, True])
def test_a_head_that_falls_silent_is_said_once_and_so_is_its_return(refuses: bool, logged: list[str]):
    head = Head()
    probe = HeadProbe(head.ask, silent_s=0.3, every_s=0.01)
    probe.start()
    try:
        time.sleep(0.5)
        probe.look()
        assert logged == []
        head.refuses = refuses
        if not refuses:
            head.there.clear()
        assert until(lambda: bool(logged), probe)
        time.sleep(0.2)
        probe.look()
        (line,) = logged
        assert line.startswith("Ray's head has not answered for ") and line.endswith("and the same command resumes")
        head.refuses = False
        head.there.set()
        assert until(lambda: len(logged) == 2, probe)
        assert logged[1] == "Ray's head answers again"
    finally:
        head.there.set()
        probe.close()


@pytest.fixture
def asked() -> Iterator[tuple[Head, HeadProbe]]:
    """A probe of a head that has answered, and is given up after a second."""
    head = Head()
    probe = HeadProbe(head.ask, silent_s=0.3, gone_s=1.0, every_s=0.2)
    probe.start()
    yield head, probe
    head.there.set()
    probe.close()


def test_a_head_that_stays_silent_is_given_up_with_a_line(asked: tuple[Head, HeadProbe]):
    head, probe = asked
    probe.look()
    assert probe.fault() == "" and not probe.silent
    head.there.clear()
    assert until(lambda: bool(probe.fault()), probe)
    assert probe.silent
    assert probe.fault() == "Ray's head has not answered for 1 s; restart it and repeat the command"


def test_time_in_which_the_driver_itself_was_stopped_is_not_silence_of_the_head(asked: tuple[Head, HeadProbe]):
    head, probe = asked
    head.there.clear()
    probe.look()
    time.sleep(2.0)  # nobody looks
    probe.look()
    assert probe.fault() == "" and not probe.silent


HANGS = """
import atexit, subprocess, threading
from actors.health.head import Ending, exit_within

def end():  # as Ray's own, of a driver whose head is stopped: it ends a raylet, and not what the raylet started
    raylet.kill()
    threading.Event().wait()

raylet = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
print(raylet.stdout.readline().decode(), flush=True)
atexit.register(end)
atexit.register(exit_within, 0.5)
Ending.status = 130
"""


@pytest.mark.long
def test_a_process_whose_end_hangs_ends_anyway_and_with_it_what_it_started():
    ended = subprocess.run([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, timeout=60)
    assert ended.returncode == 130  # as it was to
    wait_for_end(int(ended.stdout))
