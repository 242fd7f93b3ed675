"""Changes the pure rooms a little, one place at a time, and sees whether the fast tests of the room notice.

    make mutants ARGS="--sample 300 --seed 1"

Each change is made in a copy of the tree; the tests of the room that run the changed function are run there. Which
tests run which function is recorded first, with nothing changed. The room's tests are collected once: a run of some of
them is a fork of the process that did so, with the code of the changed function in the place of the loaded one. Where
that is not the same as importing the changed file (a constant, a default, a function that ran while importing), the
file is imported anew, in a fork of a process that has loaded the packages of others; with --anew always.

What survives is written to a file, and `judged.txt` says of some survivors why no test can notice them.
"""

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path

from changes import Mutant, changes, mutant, words
from room import REPOSITORY, Copy, NoSwap, Room, Run
from swap import Function
from watch import A_PROCESS, Seen

JUDGED = Path(__file__).with_name("judged.txt")
PURE = ["rstar_ray", "scheduler"]
PURE += [f"sandbox/{name}.py" for name in ("case_check", "fair_queue", "limits", "outcomes", "request", "tool_text")]
PURE += [f"sandbox/{name}.py" for name in ("verify", "cage/cut", "cage/display", "http/code_judge", "http/codec")]
LOADED = {
    "rstar_ray": ["matplotlib.pyplot", "msgpack", "numpy", "pyarrow.parquet", "torch", "transformers", "tyro"],
    "scheduler": ["matplotlib.pyplot", "numpy", "prometheus_client", "scipy.stats"],
    "sandbox": ["aiohttp", "msgpack", "psutil", "sympy"],
}
"""What the tests of a room import and no change touches, so that it is imported once."""


def load(names: list[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        for name in names:
            importlib.import_module(name)


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
    """The tests that can notice: those that run the function, or speak of the name; cheap ones first, file by file.

    Of a function that no test is seen to run, those that start a process, which may run it; of one that ran while
    importing, and of a name that nobody speaks of, all.
    """
    failing, place = set(seen.failed), (one.file, one.function)
    speaking = {place} if one.function else {function for function, names in spoken.items() if names & one.names}
    able = [test for test, ran in seen.functions.items() if ran & speaking]
    if not able and one.function and place not in seen.imported:
        able = [test for test, ran in seen.functions.items() if A_PROCESS in ran]
    elif not able:
        able = list(seen.functions)
    able = [test for test in able if test not in failing]
    cpu_s = {test: seen.cpu_s.get(test, 0.0) for test in able}
    dear = {test: cpu_s[test] > 0.05 for test in able}
    cost: Counter[tuple[bool, str]] = Counter()
    for test in able:
        cost[dear[test], test.partition("::")[0]] += cpu_s[test] + 0.005

    def order(test: str) -> tuple[bool, float, str]:
        file = test.partition("::")[0]
        return dear[test], cost[dear[test], file], file

    return sorted(able, key=order)


def sample(paths: list[str], number: int, seed: int, only: tuple[str, ...]) -> Iterator[Mutant]:
    """Places drawn alike, then one change of each; with number 0 every change of every place. Of these, `only` some."""
    files = sorted({file for path in paths for file in [REPOSITORY / path, *(REPOSITORY / path).rglob("*.py")]})
    files = [file for file in files if file.suffix == ".py" and file.name != "bench.py"]  # what measures is no rule
    sources = {str(file.relative_to(REPOSITORY)): file.read_text("utf-8") for file in files}
    places = [
        (name, at, len(news))
        for name, source in sources.items()
        for at, (_, news) in enumerate(changes(ast.parse(source)))
    ]
    draw = random.Random(seed)
    if number:  # in no order, so that a part of them tells of all
        drawn = [(*place[:2], draw.randrange(place[2])) for place in draw.sample(places, min(number, len(places)))]
    else:
        drawn = [(name, at, which) for name, at, count in places for which in range(count)]
    return (mutant(name, sources[name], at, which) for name, at, which in drawn if name.startswith(only))


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
    parser.add_argument("--only", nargs="+", default=[""], help="of those drawn, these folders or files alone")
    parser.add_argument("--tests", nargs="+", help="files or folders of tests instead of the room's")
    parser.add_argument("--again", type=Path, help="try the survivors of an earlier run, from the file it wrote")
    parser.add_argument("--anew", action="store_true", help="import the changed file for every change; slow")
    parser.add_argument("--minutes", type=float, default=inf, help="then no further change is tried")
    parser.add_argument("--survivors", type=Path, default=Path("mutants.txt"), help="where survivors are written")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", MPLBACKEND="agg")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        only = tuple(options.only)
        drawn = again(options.again) if options.again else sample(options.paths, options.sample, options.seed, only)
        measure(options, drawn, Copy(Path(folder) / "tree"))


class Tests:
    """The tests of one room of the tree, and what they were seen to do with nothing changed."""

    def __init__(self, copy: Copy, room: str, paths: list[str], *, anew: bool) -> None:
        self._copy, self._room, self._anew, self._loaded = copy, Room(copy, paths), anew, LOADED[room]
        seen = self._room.run(Run(None, 3_600, 1_200))
        if seen is None:
            sys.exit(copy.said.read_text())
        self.seen = seen
        print(f"{' '.join(paths)}: {len(seen.seconds)} tests; failing unchanged: {seen.failed}", flush=True)

    def of(self, one: Mutant, chosen: list[str]) -> Seen | None:
        """Run them with the change; None: out of time."""
        limit_s = 60 + 5 * sum(self.seen.seconds[test] for test in chosen)
        cpu_s = sum(self.seen.cpu_s.get(test, 0.0) for test in chosen)  # in a loop without end, the limit that is met
        source = (self._copy.folder / one.file).read_text("utf-8")
        with self._copy.changed(one.file, one.source):
            if one.function and not self._anew and (one.file, one.function) not in self.seen.imported:
                with contextlib.suppress(NoSwap):
                    run = Run(chosen, limit_s, 4 + 4 * cpu_s, one.file, one.function, source, one.source)
                    return self._room.run(run)
            load(self._loaded)
            return self._copy.run(sorted({test.partition("::")[0] for test in chosen}), chosen, limit_s, 20 + 4 * cpu_s)


def measure(options: argparse.Namespace, drawn: Iterable[Mutant], copy: Copy) -> None:
    until = time.monotonic() + 60 * options.minutes
    judged, spoken, tests = judgements(), mentions(copy.folder), dict[str, Tests]()
    ends: dict[str, Counter[str]] = {}
    with options.survivors.open("w", encoding="utf-8") as survivors:
        for one in drawn:
            if time.monotonic() > until:
                break
            room, started = one.file.partition("/")[0], time.monotonic()
            if room not in tests:
                tests[room] = Tests(copy, room, options.tests or [f"tests/{room}"], anew=options.anew)
            chosen = tests_of(one, tests[room].seen, spoken)
            seen = tests[room].of(one, chosen)
            reason = judged.get((one.file, one.function, one.change))
            noticed = "out of time" if seen is None else (seen.failed or [""])[0]
            end = "noticed" if noticed else "survived" if reason is None else "equivalent"
            ends.setdefault(room, Counter())[end] += 1
            detail = f"{noticed or reason or f'{len(chosen)} tests'}; {time.monotonic() - started:.1f} s"
            print(f"{one.file}:{one.line} {one.function}: {one.change}: {end} ({detail})", flush=True)
            if not noticed:
                print(one.file, one.function, one.change, reason or "", sep=" | ", file=survivors, flush=True)
    total = sum(ends.values(), Counter[str]())
    rooms = {room: {"sampled": n.total(), **n, "share": round(n["noticed"] / n.total(), 3)} for room, n in ends.items()}
    share = round(total["noticed"] / max(total.total(), 1), 3)
    print(json.dumps({"seed": options.seed, "sampled": total.total(), **total, "share": share, "rooms": rooms}))


if __name__ == "__main__":
    main()
