"""How a command ends: the status that a shell or a cluster sees, and the one line that a person reads."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from actors.launch.exit_status import status_of
from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError, LearnerError, NothingLearned


def _raises(error: BaseException) -> Callable[[], int | None]:
    def act() -> int | None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            ConfigError("--port", "70000 is not a port", "give another"),
            2,
            "error: --port: 70000 is not a port. Hint: give another\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"),
            1,
            "error: [Errno 28] No space left on device: 'metrics.jsonl'; free space, then run the same command\n",
        ),
        (LearnerError("rank 1 is gone"), 1, "error: rank 1 is gone\n"),
        (NothingLearned("no signal"), 3, "error: no signal\n"),  # no reason to start it again (recipes/again.py)
    ],
)
def test_each_kind_of_end_has_its_status_and_one_line(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
):
    assert status_of(_raises(error), interrupted="stopped") == status
    assert capsys.readouterr().err == said


def test_a_stop_that_was_asked_for_is_not_an_error(capsys: pytest.CaptureFixture[str]):
    assert status_of(_raises(KeyboardInterrupt()), interrupted="stopped") == 130
    assert tuple(capsys.readouterr()) == ("stopped\n", "")


@pytest.mark.parametrize("fault", [ZeroDivisionError(), OSError(errno.EBADF, "Bad file descriptor")])
def test_a_fault_of_ours_keeps_its_traceback(fault: Exception):
    with pytest.raises(type(fault)):
        status_of(_raises(fault))


@dataclass(frozen=True)
class NoOptions:
    pass


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (FileNotFoundError(2, "No such file", "a"), 1, "error: FileNotFoundError: [Errno 2] No such file: 'a'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_command_without_a_log_fails_and_stops_without_a_traceback(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
):
    def act(_: NoOptions) -> None:
        raise error

    assert run_command(NoOptions, act, [], description=None) == status
    assert tuple(capsys.readouterr()) == ("", said)


SERVES = """
import asyncio
from actors.talk.http_listener import until_interrupted

async def serve():
    waiting = asyncio.ensure_future(until_interrupted())
    await asyncio.sleep(0)
    print("up", flush=True)
    await waiting
    print("closed in order", flush=True)

asyncio.run(serve())
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_what_serves_ends_in_order_also_where_a_shell_began_it_in_the_background(sent: signal.Signals):
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignoring, sys.executable, "-c", SERVES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(sent)
        assert (process.stdout.read(), process.wait(60)) == ("closed in order\n", 0)
