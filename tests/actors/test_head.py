"""Whether Ray's head answers, with a fake in its place."""

import threading
import time
from collections.abc import Callable

import pytest

from actors.head import HeadProbe


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
    give_up_s = time.monotonic() + 10
    while not holds() and time.monotonic() < give_up_s:
        probe.look()
        time.sleep(0.01)
    return holds()


@pytest.mark.long
@pytest.mark.parametrize("refuses", [False, True])
def test_a_head_that_falls_silent_is_said_once_and_so_is_its_return(refuses: bool):
    shown: list[str] = []
    head = Head()
    probe = HeadProbe(head.ask, show=shown.append, silent_s=0.3, every_s=0.01)
    probe.start()
    try:
        time.sleep(0.5)
        probe.look()
        assert shown == []
        head.refuses = refuses
        if not refuses:
            head.there.clear()
        assert until(lambda: bool(shown), probe)
        time.sleep(0.2)
        probe.look()
        (line,) = shown
        assert line.startswith("Ray's head has not answered for ") and line.endswith("and the same command goes on")
        head.refuses = False
        head.there.set()
        assert until(lambda: len(shown) == 2, probe)
        assert shown[1] == "Ray's head answers again"
    finally:
        head.there.set()
        probe.close()
