"""Every attack of tests/sandbox/attacks.py and every shared case, at both levels, as root and as another user."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.as_user import USERS, start
from tests.sandbox.attacks import ATTACKS

pytestmark = pytest.mark.isolated

CASES = Path(__file__).parent / "data" / "sandbox_cases.json"
COMBINATIONS = [(level, user) for level in ("namespaces", "landlock") for user in USERS]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[tuple[str, str], dict[str, str]]]:
    """What each combination found; all run at once."""
    running = {(level, user): start(user, "tests.sandbox.attacks", level) for level, user in COMBINATIONS}
    found: dict[tuple[str, str], dict[str, str]] = {}
    try:
        for combination, process in running.items():
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err[-2000:]
            found[combination] = json.loads(out.splitlines()[-1])
        yield found
    finally:
        for process in running.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("attack", [*ATTACKS, "no_worker_was_lost"])
@pytest.mark.parametrize("level, user", COMBINATIONS)
def test_an_attack_is_contained(found: dict[tuple[str, str], dict[str, str]], level: str, user: str, attack: str):
    assert found[level, user][attack] == ""


@pytest.mark.slow
@pytest.mark.parametrize("level, user", COMBINATIONS)
def test_every_case_is_contained_one_at_a_time(level: str, user: str):
    process = start(user, "tests.sandbox.cases", level, str(CASES))
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    number = len(json.loads(CASES.read_text()))
    assert out.splitlines()[-1:] == [f"contained {number} of {number}"], out[-3000:] + err[-1000:]
