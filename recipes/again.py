"""A recipe that is started again whenever it died: the same command resumes from its newest checkpoint.

python recipes/again.py recipes/train.py --run-dir runs/mine
ray job submit --address http://127.0.0.1:8265 --working-dir . -- python recipes/again.py recipes/stage1.py
"""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.launch.stop_signals import SIGNALS

MEANT = (0, 2, 3, 130)
"""Exit statuses of a run that has ended, was refused, had no usable updates, or was stopped by the user
(`actors.launch.exit_status`).
"""
SOON_S = 600.0
MOST_SOON = 5
"""Failures in a row, each soon after a start, before it gives up."""
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How a command ended."""

    status: int  # a negative one is a signal's
    stopped: bool  # it was asked to stop; while it starts or closes, any status may follow


class Deaths:
    """Decides whether a command is started again."""

    def __init__(self) -> None:
        self._soon = 0  # in a row

    def again(self, life: Life, lasted_s: float) -> bool:
        """The decision after a process that ended in this way."""
        self._soon = self._soon + 1 if lasted_s < SOON_S else 0
        return not life.stopped and life.status not in MEANT and self._soon < MOST_SOON


def lived(command: Sequence[str]) -> Life:
    """Run the command to its end, and forward the signals that this process receives.

    It has a separate process group, so that a signal to the whole group, as by Ctrl-C, reaches it once. Where
    this process is killed it ends too.
    """
    prctl = ctypes.CDLL(None).prctl
    asked: list[int] = []

    def hand_on(number: int, _: object) -> None:
        asked.append(number)
        child.send_signal(number)

    with subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ) as child:
        before = {number: signal.signal(number, hand_on) for number in SIGNALS}
        try:
            return Life(status=child.wait(), stopped=bool(asked))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def main(command: Sequence[str]) -> int:
    if not command:
        print("usage: python recipes/again.py RECIPE [OPTIONS]", file=sys.stderr)
        return 2
    deaths = Deaths()
    while True:
        began_s = time.monotonic()
        life = lived([sys.executable, *command])
        if not deaths.again(life, time.monotonic() - began_s):
            return life.status if life.status >= 0 else 128 - life.status
        print(f"{command[0]} died ({life.status}) and is started again", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
