"""Changes the pure rooms a little, one place at a time, and sees whether the fast tests of the room notice.

    make mutants ARGS="--sample 300 --seed 1"

Each change is made in a copy of the tree; the tests of the room that run the changed function are run there, in a
fork of one process that has loaded the heavy packages. Which tests run which function is recorded first, with nothing
changed. What survives is written to a file, and `judged.txt` says of some survivors why no test can notice them.
"""

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hypothesis
import pytest
from changes import Mutant, changes, mutant, words

REPOSITORY = Path(__file__).resolve().parents[2]
JUDGED = Path(__file__).with_name("judged.txt")
PURE = ["rstar_ray", "scheduler"]
PURE += [f"sandbox/{name}.py" for name in ("case_check", "fair_queue", "limits", "outcomes", "request", "tool_text")]
PURE += [f"sandbox/{name}.py" for name in ("verify", "cage/cut", "cage/display", "http/code_judge", "http/codec")]
LOADED = ["aiohttp", "matplotlib.pyplot", "msgpack", "numpy", "prometheus_client", "psutil"]
LOADED += ["pyarrow.parquet", "scipy.stats", "sympy", "torch", "transformers", "tyro"]
Function = tuple[str, str]  # file, qualified name


@dataclass(slots=True)
class Seen:
    """What a run of tests was seen to do."""

    seconds: dict[str, float] = field(default_factory=dict)
    functions: dict[str, set[Function]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class Watch:
    """A pytest plugin: runs the chosen tests in their order, or all of them, noting what functions each one runs."""

    def __init__(self, root: str, chosen: list[str] | None) -> None:
        self.seen = Seen()
        self._root, self._chosen = root + os.sep, chosen
        self._codes: dict[CodeType, Function | None] = {}
        self._now: set[Function] = set()
        self._shared: dict[Any, set[Function]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._chosen is None:
            sys.settrace(self._called)
            threading.settrace(self._called)
        else:
            order = {name: at for at, name in enumerate(self._chosen)}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def _called(self, frame: FrameType, _event: str, _arg: object) -> None:
        code = frame.f_code
        if code not in self._codes:
            ours = code.co_filename.startswith(self._root)
            place = (code.co_filename.removeprefix(self._root), code.co_qualname.partition(".<locals>")[0])
            self._codes[code] = place if ours else None
        if place := self._codes[code]:
            self._now.add(place)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any):
        """What a shared fixture runs counts for all tests that use it, not for the first alone."""
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


class Copy:
    """A copy of the tree, in which files are changed and tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, folder.parent / "output"
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

    def run(self, paths: list[str], chosen: list[str] | None, limit_s: float) -> Seen | None:
        """Run the tests of these paths, the chosen ones in order up to the first that fails; None: out of time."""
        answer = self.folder.parent / "answer"
        answer.unlink(missing_ok=True)
        if not (child := os.fork()):
            try:
                self._run_here(paths, chosen, limit_s, answer)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        started, gone = time.monotonic(), 0
        while not gone and time.monotonic() - started - waited_s(child) < limit_s:
            time.sleep(0.02)
            gone, _ = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not gone:
            os.waitpid(child, 0)
        if not answer.exists():
            return None
        seconds, functions, failed = json.loads(answer.read_text())
        return Seen(seconds, {test: {(f, q) for f, q in ran} for test, ran in functions.items()}, failed)

    def _run_here(self, paths: list[str], chosen: list[str] | None, limit_s: float, answer: Path) -> None:
        os.setsid()
        with self.said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s / 2), int(limit_s / 2)))
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
        os.chdir(self.folder)
        os.environ["PYTHONPATH"] = str(self.folder)
        here = {"", str(REPOSITORY), str(Path(__file__).parent)}
        sys.path[:] = [str(self.folder), *(entry for entry in sys.path if entry not in here)]
        sys.dont_write_bytecode = chosen is not None
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", database=None, deadline=None, derandomize=True, phases=phases)
        options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=mutants"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow and not gpu and not real"]
        options += [] if chosen is None else ["-x"]
        watch = Watch(str(self.folder), chosen)
        code = pytest.main([*options, *paths], plugins=[watch])
        sys.settrace(None)
        seen = watch.seen
        failed = seen.failed or ([] if code in (0, 5) else [f"pytest ends with {code}"])
        functions = {test: sorted(ran) for test, ran in seen.functions.items()} if chosen is None else {}
        answer.write_text(json.dumps([seen.seconds, functions, failed]))
        os._exit(0)


def waited_s(pid: int) -> float:
    """Seconds that a process has waited for a core: on a busy machine they do not count against it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def mentions(folder: Path) -> dict[Function, set[str]]:
    """Which names each function of the tree speaks of."""
    found: dict[Function, set[str]] = {}

    def below(node: ast.AST, file: str, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                below(child, file, f"{scope}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                words = [getattr(n, key, None) for n in ast.walk(child) for key in ("id", "attr", "arg", "name")]
                found[file, scope + child.name] = {word for word in words if isinstance(word, str)}

    for path in folder.rglob("*.py"):
        below(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(folder)), "")
    return found


def tests_of(one: Mutant, seen: Seen, spoken: dict[Function, set[str]]) -> list[str]:
    """The tests that can notice: those that run the function, or speak of the name; cheap files first."""
    failing = set(seen.failed)
    if one.function:
        able = [test for test, ran in seen.functions.items() if (one.file, one.function) in ran]
    else:
        speaking = {function for function, names in spoken.items() if names & one.names}
        able = [test for test, ran in seen.functions.items() if ran & speaking]
    able = [test for test in (able or list(seen.functions)) if test not in failing]
    cost: Counter[str] = Counter()
    for test in able:
        cost[test.partition("::")[0]] += seen.seconds[test] + 0.05
    return sorted(able, key=lambda test: (cost[test.partition("::")[0]], test.partition("::")[0]))


def sample(paths: list[str], number: int, seed: int) -> list[Mutant]:
    """Places drawn alike, then one change of each; with number 0 every change of every place."""
    files = sorted({file for path in paths for file in [REPOSITORY / path, *(REPOSITORY / path).rglob("*.py")]})
    files = [file for file in files if file.suffix == ".py" and file.name != "bench.py"]  # what measures is no rule
    sources = {str(file.relative_to(REPOSITORY)): file.read_text("utf-8") for file in files}
    places = [
        (name, at, len(news))
        for name, source in sources.items()
        for at, (_, news) in enumerate(changes(ast.parse(source)))
    ]
    if not number:
        return [mutant(name, sources[name], at, which) for name, at, count in places for which in range(count)]
    draw = random.Random(seed)
    drawn = draw.sample(places, min(number, len(places)))  # in no order, so that a part of them tells of all
    return [mutant(name, sources[name], at, draw.randrange(count)) for name, at, count in drawn]


def again(survivors: Path) -> list[Mutant]:
    """The changes that an earlier run wrote down as survivors, as far as their places still read so."""
    wanted = {tuple(line.split(" | ")[:3]) for line in survivors.read_text("utf-8").splitlines()}
    found: dict[tuple[str, str, str], Mutant] = {}
    for name in sorted({file for file, *_ in wanted}):
        source = (REPOSITORY / name).read_text("utf-8") if (REPOSITORY / name).is_file() else ""
        for at, (place, news) in enumerate(changes(ast.parse(source))):
            for which, new in enumerate(news):
                key = (name, place.function, words(place, new))
                if key in wanted and key not in found:
                    found[key] = mutant(name, source, at, which)
    return list(found.values())


def judgements() -> dict[tuple[str, str, str], str]:
    lines = [line.split(" | ") for line in JUDGED.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    return {(file, function, change): reason for file, function, change, reason in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description="Do the fast tests of a room notice small changes in it?")
    parser.add_argument("paths", nargs="*", default=PURE, help="files or folders; default: the pure rooms")
    parser.add_argument("--sample", type=int, default=300, help="how many changes; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="files or folders of tests instead of the room's")
    parser.add_argument("--again", type=Path, help="try the survivors of an earlier run, from the file it wrote")
    parser.add_argument("--minutes", type=float, default=inf, help="then no further change is tried")
    parser.add_argument("--survivors", type=Path, default=Path("mutants.txt"), help="where survivors are written")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", MPLBACKEND="agg")
    with contextlib.redirect_stderr(io.StringIO()):
        for name in LOADED:
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        drawn = again(options.again) if options.again else sample(options.paths, options.sample, options.seed)
        measure(options, drawn, Copy(Path(folder) / "tree"))


def measure(options: argparse.Namespace, drawn: list[Mutant], copy: Copy) -> None:
    until = time.monotonic() + 60 * options.minutes
    judged, spoken, maps = judgements(), mentions(copy.folder), dict[str, Seen]()
    ends: dict[str, Counter[str]] = {}
    with options.survivors.open("w", encoding="utf-8") as survivors:
        for one in drawn:
            if time.monotonic() > until:
                break
            room = one.file.partition("/")[0]
            if room not in maps:
                folders = options.tests or [f"tests/{room}"]
                maps[room] = copy.run(folders, None, 1800) or sys.exit(copy.said.read_text())
                print(
                    f"{' '.join(folders)}: {len(maps[room].seconds)} tests; failing unchanged: {maps[room].failed}",
                    flush=True,
                )
            chosen = tests_of(one, maps[room], spoken)
            limit_s = 30 + 5 * sum(maps[room].seconds[test] for test in chosen)
            with copy.changed(one.file, one.source):
                seen = copy.run(sorted({test.partition("::")[0] for test in chosen}), chosen, limit_s)
            reason = judged.get((one.file, one.function, one.change))
            noticed = "out of time" if seen is None else (seen.failed or [""])[0]
            end = "noticed" if noticed else "survived" if reason is None else "equivalent"
            ends.setdefault(room, Counter())[end] += 1
            detail = noticed or reason or f"{len(chosen)} tests"
            print(f"{one.file}:{one.line} {one.function}: {one.change}: {end} ({detail})", flush=True)
            if not noticed:
                print(one.file, one.function, one.change, reason or "", sep=" | ", file=survivors, flush=True)
    total = sum(ends.values(), Counter[str]())
    rooms = {room: {"sampled": n.total(), **n, "share": round(n["noticed"] / n.total(), 3)} for room, n in ends.items()}
    share = round(total["noticed"] / max(total.total(), 1), 3)
    print(json.dumps({"seed": options.seed, "sampled": total.total(), **total, "share": share, "rooms": rooms}))


if __name__ == "__main__":
    main()
