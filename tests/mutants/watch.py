"""Which tests run which functions, how long they take, and which fail: a pytest plugin."""

import cProfile
import os
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
    cpu_s: dict[str, float] = field(default_factory=dict)  # of this process and of those it has ended
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
        self._calls: cProfile.Profile | None = None  # of this thread; a trace in Python takes several times as long

    def start(self) -> None:
        self._calls = cProfile.Profile(subcalls=False, builtins=False)
        self._calls.enable()
        threading.settrace(self._called)

    def stop(self) -> None:
        self._turn_to(self._now)
        if self._calls is not None:
            self._calls.disable()
            self._calls = None
        threading.settrace(None)  # pyright: ignore[reportArgumentType]  (as its documentation has it)

    def _turn_to(self, functions: set[Function]) -> None:
        """What was called until now is noted; what comes, among these."""
        if self._calls is not None:
            self._calls.disable()
            for entry in self._calls.getstats():
                if isinstance(entry.code, CodeType) and (place := self._place(entry.code)):
                    self._now.add(place)
            self._calls.clear()
            self._calls.enable()
        self._now = functions

    def _called(self, frame: FrameType, _event: str, _arg: object) -> None:
        if place := self._place(frame.f_code):
            self._now.add(place)

    def _place(self, code: CodeType) -> Function | None:
        if code not in self._codes:
            self._codes[code] = None
            if code.co_filename.startswith(self._root):
                self._codes[code] = (code.co_filename.removeprefix(self._root), outermost(code))
            elif code.co_qualname == A_PROCESS[1]:
                self._codes[code] = A_PROCESS
        return self._codes[code]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any):
        before = self._now
        self._turn_to(self._shared.setdefault(fixturedef, set()))
        try:
            return (yield)
        finally:
            self._turn_to(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any):
        self._turn_to(self.seen.functions.setdefault(item.nodeid, set()))
        started_s = sum(os.times()[:4])
        result = yield
        self.seen.cpu_s[item.nodeid] = sum(os.times()[:4]) - started_s
        self._turn_to(set())
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
