"""The fuzzer repeats itself, its oracle notices what it is there to notice, and a short run of it finds nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rstar_ray.outcome import Outcome
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest, ExecutionResult
from tests.fuzz.__main__ import main as fuzz
from tests.fuzz.oracle import Canaries, Machine, Oracle, books
from tests.fuzz.programs import KINDS, made
from tests.sandbox.as_user import USERS

pytestmark = pytest.mark.caged

REPOSITORY = Path(__file__).resolve().parents[2]
REQUEST = ExecutionRequest(code="1")


def test_what_the_door_would_not_read_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for said in (["--show"], ["--levels", "landlock"], ["--users", next(iter(USERS))]):
        monkeypatch.setattr("sys.argv", ["fuzz", "--door", *said])
        with pytest.raises(SystemExit, match="2"):
            fuzz()
        assert "--door has no programs, levels or users to choose" in capsys.readouterr().err


def test_a_seed_and_a_number_make_a_program():
    programs = [made(7, number, "namespaces", ("/canary",)) for number in range(300)]
    assert programs == [made(7, number, "namespaces", ("/canary",)) for number in range(300)]
    assert {program.name.split()[1] for program in programs} == set(KINDS)
    assert all("/canary" in program.request.code for program in programs if program.name.endswith("calls"))
    assert made(8, 0, "namespaces").request != programs[0].request
    assert {made(7, number, "landlock").request.language for number in range(300)} == {"python"}


@pytest.fixture
def canaries(tmp_path: Path) -> Iterator[Canaries]:
    with Canaries(tmp_path) as found:
        yield found


def test_canaries_that_nobody_touched_are_well(canaries: Canaries):
    (canaries.home / "open").read_text()
    os.listdir(canaries.home)  # noqa: PTH208
    assert canaries.wrong() == []


@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (lambda one: (one.home / "open").write_text("x"), "texts"),
        (lambda one: (one.home / "closed").chmod(0o644), "metadata"),
        (lambda one: os.utime(one.home), "metadata"),
        (lambda one: os.link(one.home / "open", one.folder / "more"), "metadata"),
        (lambda one: (one.home / "new").touch(), "files"),
        (lambda one: os.setpriority(os.PRIO_PROCESS, one.process.pid, 19), "nice"),
        (lambda one: one.process.kill() or one.process.wait(), "state"),
    ],
)
def test_a_canary_that_was_reached_tells(canaries: Canaries, harm, name: str):
    harm(canaries)
    assert any(f"canary {name}" in wrong for wrong in canaries.wrong())


def test_a_machine_tells_what_is_new(tmp_path: Path):
    before = Machine.now(tmp_path)
    assert before.wrong(before) == []
    for name, change in (
        ("mounts", {"mounts": [*before.mounts, "one more"]}),
        ("ipc", {"ipc": {}}),
        ("folders", {"folders": ["sandbox-left"]}),
        ("processes", {"processes": [*before.processes, "4711 left"]}),
        ("descriptors", {"descriptors": before.descriptors + 9}),
        ("memory", {"resident_bytes": before.resident_bytes + (1 << 30)}),
        ("disk", {"disk_bytes": before.disk_bytes + (2 << 20)}),
    ):
        assert [wrong.split()[0].strip(":") for wrong in before.wrong(replace(before, **change))] == [name]


async def test_results_and_books_tell(pool: SandboxPool, canaries: Canaries):
    oracle = Oracle(pool, canaries, canaries.folder)
    told = ExecutionResult(outcome=Outcome.OK, stderr=f"x{canaries.secret}x")
    assert oracle.of_result(told, REQUEST) == ["a program read the secret"]
    assert oracle.of_result(ExecutionResult(outcome=Outcome.OK, wall_s=99.0), REQUEST)
    assert oracle.of_result(ExecutionResult(outcome=Outcome.INVALID), REQUEST)
    stats = replace(pool.stats(), running=0, waiting=0, accepted=5, finished={"ok": 5}, failed=0)
    assert books(stats, stats) == []
    for change in ({"cells_lost": stats.cells_lost + 1}, {"running": 1}, {"finished": {"ok": 4}}):
        assert books(stats, replace(stats, **change))


def test_a_short_run_finds_nothing_and_says_how_to_repeat_a_round():
    arguments = ["--seed", "1", "--rounds", "3", "--levels", "namespaces", "landlock", "--users"]
    users = ["root"] if os.geteuid() == 0 else ["this user"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments, *users], cwd=REPOSITORY, capture_output=True, text=True
    )
    if "no pid namespace here" in done.stderr:
        pytest.skip("no pid namespaces here")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *found = done.stdout.splitlines()
    assert first == "seed 1"
    assert [(row["level"], row["rounds"], row["findings"]) for row in map(json.loads, found)] == [
        ("namespaces", 3, []),
        ("landlock", 3, []),
    ]
