"""Run a recipe, and start it again after each failure: the same command resumes from its newest checkpoint.

python recipes/again.py recipes/train.py --run-dir runs/mine
rstar again train --run-dir runs/mine
ray job submit --address http://127.0.0.1:8265 --working-dir . -- python recipes/again.py recipes/stage1.py \\
    --run-dir runs/job

It stops when the run is done, refused, without usable updates, or stopped by the user, and after five failures in a
row that each came within ten minutes of a start. It returns the last exit status.
"""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.launch.stop_signals import SIGNALS
from recipes.__main__ import COMMANDS
from rstar_ray.exit_status import DONE, NO_USABLE_UPDATE, REFUSED, STOPPED

FINAL_STATUSES = (DONE, REFUSED, NO_USABLE_UPDATE, STOPPED)
"""Exit statuses after which another start would not help."""
EARLY_FAILURE_S = 600.0
MAX_EARLY_FAILURES = 5
"""Failures in a row, each within `EARLY_FAILURE_S` of a start, after which it gives up."""
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a process ended."""

    status: int  # negative: the number of the signal that ended it
    stopped: bool  # a stop was requested; while the process starts or closes, any status may follow


class RestartPolicy:
    """Decides whether a command is started again."""

    def __init__(self) -> None:
        self._early_failures = 0  # in a row

    def should_restart(self, end: ProcessEnd, ran_s: float) -> bool:
        """The decision after a process that ran for `ran_s` seconds."""
        self._early_failures = self._early_failures + 1 if ran_s < EARLY_FAILURE_S else 0
        failed = not end.stopped and end.status not in FINAL_STATUSES
        return failed and self._early_failures < MAX_EARLY_FAILURES


def run_process(command: Sequence[str]) -> ProcessEnd:
    """Run the command to its end, and forward the signals that this process receives.

    The command has a separate process group, so that a signal to the whole group, as by Ctrl-C, reaches it once. If
    this process is killed, the command is killed too.
    """
    prctl = ctypes.CDLL(None).prctl
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        child.send_signal(number)

    with subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ) as child:
        before = {number: signal.signal(number, forward) for number in SIGNALS}
        try:
            return ProcessEnd(status=child.wait(), stopped=bool(received))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def python_arguments(command: Sequence[str]) -> list[str]:
    """The arguments of Python that run a recipe, which is a file or a command of `rstar`.

    >>> python_arguments(["recipes/train.py", "--steps", "3"]), python_arguments(["stage", "1"])
    (['recipes/train.py', '--steps', '3'], ['-P', '-m', 'recipes', 'stage', '1'])
    """
    names = {name.partition(" ")[0] for name in COMMANDS}
    # -P: a package `recipes` of the current folder is not ours
    return ["-P", "-m", "recipes", *command] if command[0] in names else [*command]


def main(argv: Sequence[str] | None = None) -> int:
    command = list(sys.argv[1:] if argv is None else argv)
    if not command or command[0] in ("-h", "--help"):
        usage = "usage: rstar again RECIPE [OPTIONS]; RECIPE is a file (recipes/train.py) or a command (train, stage 1)"
        print(usage, file=sys.stdout if command else sys.stderr)
        return DONE if command else REFUSED
    policy = RestartPolicy()
    while True:
        started_s = time.monotonic()
        end = run_process([sys.executable, *python_arguments(command)])
        if not policy.should_restart(end, time.monotonic() - started_s):
            return end.status if end.status >= 0 else 128 - end.status
        cause = f"exit status {end.status}" if end.status >= 0 else f"signal {-end.status}"
        print(f"{command[0]} failed ({cause}) and is started again", flush=True)


if __name__ == "__main__":
    sys.exit(main())
