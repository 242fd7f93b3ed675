"""A recipe that is started again whenever it died: the same command goes on from its newest checkpoint.

python recipes/again.py recipes/train.py --run-dir runs/mine
ray job submit --address http://127.0.0.1:8265 --working-dir . -- python recipes/again.py recipes/stage1.py
"""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from recipes.stop import SIGNALS

MEANT = (0, 2, 130)
"""Statuses of a run that has ended, was refused, or was stopped by a person (`recipes.ending`)."""
SOON_S = 600.0
MOST_SOON = 5
"""Deaths in a row, each so soon after its start, until it is left dead."""
PR_SET_PDEATHSIG = 1  # prctl(2)


class Deaths:
    """Whether a command is worth another start."""

    def __init__(self) -> None:
        self._soon = 0  # in a row

    def again(self, status: int, lasted_s: float) -> bool:
        """After a life that ended so; a negative status is a signal's."""
        self._soon = self._soon + 1 if lasted_s < SOON_S else 0
        return status not in MEANT and self._soon < MOST_SOON


def lived(command: Sequence[str]) -> int:
    """Run it to its end, and hand on what this process is asked to stop by; the status.

    It has a process group of its own, so that what is sent to a whole group, as by Ctrl-C, reaches it once; where this
    process is killed it ends too.
    """
    prctl = ctypes.CDLL(None).prctl
    with subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ) as child:
        before = {number: signal.signal(number, lambda number, _: child.send_signal(number)) for number in SIGNALS}
        try:
            return child.wait()
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
        status = lived([sys.executable, *command])
        if not deaths.again(status, time.monotonic() - began_s):
            return status if status >= 0 else 128 - status
        print(f"{command[0]} died ({status}) and is started again", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
