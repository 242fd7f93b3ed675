"""A command that is started again after a failure, with small programs in place of a recipe."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.again import EARLY_FAILURE_S, MAX_EARLY_FAILURES, ProcessEnd, RestartPolicy, main, python_arguments

COUNTS = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.write_text((p.read_text() if p.exists() else '') + 'x')"
SAVES = f"""
import asyncio
from actors.launch.stop_signals import StopSignals, grace_of_run
async def run():
    stop = StopSignals(grace_of_run(60))
    with stop.handled():
        {COUNTS}
        while not stop.asked():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        p.write_text(p.read_text() + ", saved")
asyncio.run(run())
raise SystemExit(130)
"""


@pytest.mark.parametrize(("status", "stopped"), [(0, False), (2, False), (3, False), (130, False), (1, True)])
def test_a_run_that_is_done_refused_or_stopped_is_not_started_again(status: int, stopped: bool):
    assert not RestartPolicy().should_restart(ProcessEnd(status=status, stopped=stopped), ran_s=2 * EARLY_FAILURE_S)


def test_it_gives_up_after_early_failures_in_a_row():
    policy, failure = RestartPolicy(), ProcessEnd(status=1, stopped=False)
    early = [policy.should_restart(failure, ran_s=1.0) for _ in range(MAX_EARLY_FAILURES - 1)]
    assert all(early) and policy.should_restart(failure, ran_s=2 * EARLY_FAILURE_S)
    assert [policy.should_restart(failure, ran_s=1.0) for _ in range(MAX_EARLY_FAILURES)] == [*early, False]


def test_a_recipe_is_a_file_or_a_command_of_rstar():
    assert python_arguments(["train", "--steps", "3"]) == ["-P", "-m", "recipes", "train", "--steps", "3"]
    assert python_arguments(["recipes/train.py", "--steps", "3"]) == ["recipes/train.py", "--steps", "3"]


def test_a_command_that_was_killed_runs_until_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lives, program = tmp_path / "lives", tmp_path / "program.py"
    program.write_text(f"{COUNTS}\nimport os\nif len(p.read_text()) < 3: os.kill(os.getpid(), 9)")
    assert main([str(program), str(lives)]) == 0
    assert lives.read_text() == "xxx"
    assert capsys.readouterr().out == f"{program} failed (signal 9) and is started again\n" * 2


def test_a_run_that_learned_nothing_is_not_started_again(tmp_path: Path):
    lives, program = tmp_path / "lives", tmp_path / "program.py"
    program.write_text(f"{COUNTS}\nsys.exit(3)")
    assert main([str(program), str(lives)]) == 3
    assert lives.read_text() == "x"


def test_a_signal_that_every_process_of_a_job_gets_asks_once(tmp_path: Path):
    lives, program = tmp_path / "lives", tmp_path / "program.py"
    program.write_text(SAVES)
    again = started(program, lives)
    for process in [again, *psutil.Process(again.pid).children(recursive=True)]:  # as `ray job stop` does
        process.send_signal(signal.SIGTERM)
    assert again.wait(60) == 130
    assert lives.read_text() == "x, saved"


@pytest.mark.parametrize(
    ("handler", "status"), [("pass", 143), ("import signal; signal.signal(15, lambda *_: sys.exit(1))", 1)]
)
def test_one_that_is_stopped_before_it_can_say_so_or_while_it_closes_is_not_started_again(
    tmp_path: Path, handler: str, status: int
):
    lives, program = tmp_path / "lives", tmp_path / "program.py"
    program.write_text(f"{handler}\n{COUNTS}\nimport time; time.sleep(60)")
    again = started(program, lives)
    again.send_signal(signal.SIGTERM)
    assert again.wait(60) == status
    assert lives.read_text() == "x"


@pytest.mark.long
def test_a_command_goes_with_who_starts_it_again(tmp_path: Path):
    lives, program = tmp_path / "lives", tmp_path / "program.py"
    program.write_text(f"{COUNTS}\nimport time; time.sleep(60)")
    again = started(program, lives)
    (child,) = psutil.Process(again.pid).children()
    again.kill()
    again.wait(60)
    assert psutil.wait_procs([child], timeout=30)[1] == []


def started(program: Path, lives: Path) -> "subprocess.Popen[bytes]":
    """Once the program is at work: it writes `lives` behind its handlers."""
    again = subprocess.Popen([sys.executable, "recipes/again.py", str(program), str(lives)])
    give_up_s = time.monotonic() + 60
    while not (lives.exists() and lives.read_text()) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    return again
