"""The fuzzer repeats itself, its oracle notices what it is there to notice, and a short run of it finds nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.oracle import Canaries
from tests.fuzz.programs import KINDS, made

pytestmark = pytest.mark.isolated

REPOSITORY = Path(__file__).resolve().parents[2]


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
