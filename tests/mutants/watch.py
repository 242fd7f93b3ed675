"""Which tests run which functions, how long they take, and which fail: a pytest plugin."""

import os
import sys
import threading
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import pytest
from swap import Function, outermost

A_PROCESS: Function = ("", "Popen.__init__")  # run by a test that starts one, whose functions nobody sees


@dataclass(slots=True)
class Seen:
    """What a run of tests was seen to do."""

    seconds: dict[str, float] = field(default_factory=dict)
    functions: dict[str, set[Function]] = field(default_factory=dict)
    imported: set[Function] = field(default_factory=set)  # run before the first test
    failed: list[str] = field(default_factory=list)


class Watch:
    """Notes what the tests do; of a shared fixture, for all the tests that use it and not for the first alone."""

    def __init__(self, root: str) -> None:
        self.seen = Seen()
        self._root = root + os.sep
        self._codes: dict[CodeType, Function | None] = {}
        self._now = self.seen.imported
        self._shared: dict[Any, set[Function]] = {}

    def start(self) -> None:
        sys.settrace(self._called)
        threading.settrace(self._called)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore[reportArgumentType]  (as its documentation has it)

    def _called(self, frame: FrameType, _event: str, _arg: object) -> None:
        code = frame.f_code
        if code not in self._codes:
            self._codes[code] = None
            if code.co_filename.startswith(self._root):
                self._codes[code] = (code.co_filename.removeprefix(self._root), outermost(code))
            elif code.co_qualname == A_PROCESS[1]:
                self._codes[code] = A_PROCESS
        if place := self._codes[code]:
            self._now.add(place)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any):
        before, self._now = self._now, self._shared.setdefault(fixturedef, set())
        try:
            return (yield)
        finally:
            self._now = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any):
        self.seen.functions[item.nodeid] = self._now = set()
        result = yield
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            for fixture in fixtures:
                self.seen.functions[item.nodeid] |= self._shared.get(fixture, set())
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seen.seconds[report.nodeid] = self.seen.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.seen.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.seen.failed.append(f"importing {report.nodeid}")
