"""A copy of the tree in which files are changed, and processes in which its tests run."""

import contextlib
import gc
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FunctionType
from typing import Any

import hypothesis
import pytest
from swap import loaded, swaps
from watch import Seen, Watch

REPOSITORY = Path(__file__).resolve().parents[2]
FAST = "not slow and not gpu and not real"


@dataclass(frozen=True, slots=True)
class Run:
    """Tests to run, in this order, up to the first that fails (None: all of them), with one function changed."""

    chosen: list[str] | None
    limit_s: float
    cpu_limit_s: float
    file: str = ""
    function: str = ""
    source: str = ""
    changed: str = ""


class Copy:
    """A copy of the tree."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.answer = folder, folder.parent / "output", folder.parent / "answer"
        self._changes = 0
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            if (REPOSITORY / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, folder / name)

    @contextlib.contextmanager
    def changed(self, file: str, source: str):
        path = self.folder / file
        kept, times = path.read_bytes(), (path.stat().st_atime, path.stat().st_mtime)
        path.write_text(source, encoding="utf-8")
        self._changes += 10  # no compiled file may pass for this one: they are known by second and size
        os.utime(path, (times[0], times[1] + self._changes))
        try:
            yield
        finally:
            path.write_bytes(kept)
            os.utime(path, times)

    def run(self, paths: list[str], chosen: list[str], limit_s: float, cpu_limit_s: float) -> Seen | None:
        """Import these files of tests and run the chosen ones up to the first that fails; None: out of time."""
        self.answer.unlink(missing_ok=True)
        if forked(limit_s, cpu_limit_s) is None:
            self.tests(paths, Watch(str(self.folder)), Chosen(chosen))
        return self.answered()

    def answered(self) -> Seen | None:
        return pickle.loads(self.answer.read_bytes()) if self.answer.exists() else None

    def tests(self, paths: list[str], watch: Watch, *plugins: object) -> None:
        """Become a process that runs tests in this copy, and answers."""
        try:
            with self.said.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            here = {"", str(REPOSITORY), str(Path(__file__).parent)}
            sys.path[:] = [str(self.folder), *(entry for entry in sys.path if entry not in here)]
            phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
            hypothesis.settings.register_profile(
                "mutants", database=None, deadline=None, derandomize=True, phases=phases
            )
            options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=mutants"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", FAST]
            code = pytest.main([*options, *paths], plugins=[watch, *plugins])
            watch.stop()
            if not watch.seen.failed and code not in (0, 5):
                watch.seen.failed.append(f"pytest ends with {code}")
            self.answer.write_bytes(pickle.dumps(watch.seen))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


class Chosen:
    """A plugin: these tests in this order, up to the first that fails."""

    def __init__(self, chosen: list[str]) -> None:
        self._chosen = chosen
        sys.dont_write_bytecode = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        order = {name: at for at, name in enumerate(self._chosen)}
        session.items = sorted((i for i in session.items if i.nodeid in order), key=lambda item: order[item.nodeid])
        session.config.option.maxfail = 1


class NoSwap(Exception):
    """A loaded function cannot be made the changed one."""


class Room:
    """A process that has collected the tests of a room; each run of some is a fork of it that imports nothing."""

    def __init__(self, copy: Copy, paths: list[str]) -> None:
        self._copy = copy
        self._ours, theirs = Pipe()
        if not os.fork():
            self._ours.close()
            self._watch = Watch(str(copy.folder))
            self._asked: Connection[Any, Any] = theirs
            self._watch.start()
            copy.tests(paths, self._watch, self)
        theirs.close()

    def run(self, wanted: Run) -> Seen | None:
        """What the tests did; None: out of time. NoSwap: for this change the changed file must be imported."""
        self._copy.answer.unlink(missing_ok=True)
        self._ours.send(wanted)
        if not self._ours.recv():
            raise NoSwap(wanted.function)
        return self._copy.answered()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """In the process that has collected: serve. In its forks: go on, and run what was asked for."""
        self._watch.stop()
        functions = loaded(str(self._copy.folder))
        gc.collect()
        gc.freeze()
        while True:
            try:
                wanted: Run = self._asked.recv()
            except EOFError:
                os._exit(0)
            path = str(self._copy.folder / wanted.file)
            live: list[FunctionType] = functions.get((path, wanted.function), [])
            new = wanted.function and swaps(path, wanted.source, wanted.changed, wanted.function, live)
            if wanted.function and not new:
                self._asked.send(False)
            elif forked(wanted.limit_s, wanted.cpu_limit_s) is not None:
                self._asked.send(True)
            else:
                break
        for function, code in new or []:
            function.__code__ = code
        if wanted.chosen is None:
            self._watch.start()
        else:
            Chosen(wanted.chosen).pytest_runtestloop(session)


def forked(limit_s: float, cpu_limit_s: float) -> bool | None:
    """None in the child; in the parent, once it has ended, whether it did so by itself in time."""
    if not (child := os.fork()):
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_limit_s), int(cpu_limit_s)))
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
        return None
    started, gone, nap = time.monotonic(), 0, 0.002
    while not gone and time.monotonic() - started - waited_s(child) < limit_s:
        time.sleep(nap := min(1.2 * nap, 0.05))
        gone, _ = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not gone:
        os.waitpid(child, 0)
    return bool(gone)


def waited_s(pid: int) -> float:
    """Seconds that a process has waited for a core: on a busy machine they do not count against it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
