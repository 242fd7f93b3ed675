"""How a command ends: the status that a shell or a cluster sees, and the one line that a person reads."""

import errno
import io
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from actors.head import Ending
from recipes.ending import status_of
from recipes.session import say
from rstar_ray.errors import ConfigError, EngineError, LearnerError, Stopped


def _raises(error: BaseException) -> Callable[[], int | None]:
    def act() -> int | None:
        raise error

    return act


@pytest.mark.parametrize(("act", "status"), [(lambda: None, 0), (_raises(Stopped("stopped")), 130)])
def test_what_ray_holds_up_at_the_end_ends_with_the_same_status(
    act: Callable[[], int | None], status: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Ending, "status", 1)
    assert status_of(act) == status == Ending.status


def test_a_line_that_nobody_can_see_any_more_ends_nothing(monkeypatch: pytest.MonkeyPatch):
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Closed())
    say("step 1")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            ConfigError("--port", "70000 is no port", "give another"),
            2,
            "error: --port: 70000 is no port; give another\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"),
            1,
            "error: [Errno 28] No space left on device: 'metrics.jsonl'; make room, and the same command goes on\n",
        ),
        (LearnerError("rank 1 is gone"), 1, "error: rank 1 is gone\n"),
        (KeyboardInterrupt(), 130, "error: stopped\n"),
    ],
)
def test_each_kind_of_end_has_its_status_and_one_line(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
):
    assert status_of(_raises(error), interrupted="stopped") == status
    assert capsys.readouterr().err == said


def test_what_an_actor_raised_is_said_without_its_traceback(capsys: pytest.CaptureFixture[str]):
    raised = RayTaskError("start", "Traceback\n  File ...", EngineError("the engine did not start"))
    assert status_of(_raises(raised.as_instanceof_cause())) == 1
    assert capsys.readouterr().err == "error: the engine did not start\n"


def test_an_actor_that_is_gone_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert status_of(_raises(ActorUnavailableError("it died:\n  exit code 1", None))) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ActorUnavailableError: ") and "exit code 1" in said and said.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        status_of(_raises(ZeroDivisionError()))


def test_a_clean_stop_says_that_the_same_command_goes_on(capsys: pytest.CaptureFixture[str]):
    assert status_of(_raises(Stopped("SIGTERM"))) == 130
    assert capsys.readouterr().err.endswith("; the same command goes on\n")


def test_a_command_without_a_word_for_ctrl_c_says_nothing(capsys: pytest.CaptureFixture[str]):
    assert status_of(_raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_the_status_of_what_ends_by_itself_is_its_own():
    assert status_of(lambda: None) == 0
    assert status_of(lambda: 1) == 1


@pytest.mark.parametrize("fault", [ZeroDivisionError(), OSError(errno.EBADF, "Bad file descriptor")])
def test_a_fault_of_ours_keeps_its_traceback(fault: Exception):
    with pytest.raises(type(fault)):
        status_of(_raises(fault))


SERVES = """
import asyncio
from recipes.listen import until_interrupted

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
        assert (process.stdout.read(), process.wait(30)) == ("closed in order\n", 0)
