"""Ctrl-C or a cluster's SIGTERM: the first signal requests a clean stop, the second stops immediately."""

import asyncio
import logging
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from rstar_ray.errors import Stopped

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 1.0
"""A repeated signal within this time is a duplicate: `ray job stop` and `scancel` signal every process of a
job, and `recipes.again` forwards the signal.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """How long work may continue after the first signal, and the messages."""

    seconds: float  # until the current work is cancelled
    notice: str  # logged at the first signal
    ended: str  # message of `Stopped` if the work was cancelled


def grace_of_run(seconds: float) -> Grace:
    """Time for the current step and its checkpoint."""
    return Grace(
        seconds=seconds,
        notice=f"the run ends after the current step, with a checkpoint, in {seconds:g} s at most",
        ended="stopped in the middle of a step, without a new checkpoint",
    )


GRACE_OF_EVALUATION = Grace(
    seconds=0.0,
    notice="the evaluation ends here; finished problems are kept",
    ended="stopped; finished problems are kept",
)


class StopSignals:
    """Whether a command should stop; signals are received within `handled`."""

    def __init__(self, grace: Grace) -> None:
        self._grace = grace
        self._asked = 0

    def asked(self) -> bool:
        return self._asked > 0

    @contextmanager
    def handled(self) -> Generator[None, None, None]:
        """Raises `Stopped` if the entering task is cancelled by a second signal, or at the end of the grace time."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "entered in a task"
        timers: list[asyncio.TimerHandle] = []
        echoing: set[signal.Signals] = set()
        left = False

        def received(number: signal.Signals) -> None:
            if left or number in echoing:
                return
            echoing.add(number)
            # Through the queue: a duplicate that arrived while the loop was busy is processed before `heed`.
            loop.call_later(ECHO_S, loop.call_soon, heed, number)
            self._asked += 1
            if self._asked == 1:
                log.info(f"{number.name}: {self._grace.notice}; a second one after {ECHO_S:g} s ends it at once")
                timers.append(loop.call_later(self._grace.seconds, task.cancel))
            else:
                task.cancel()

        def heed(number: signal.Signals) -> None:
            echoing.discard(number)
            if left:
                loop.remove_signal_handler(number)

        for number in SIGNALS:
            loop.add_signal_handler(number, received, number)
        try:
            yield
        except asyncio.CancelledError:
            if not self._asked:
                raise
            task.uncancel()
            raise Stopped(self._grace.ended) from None
        finally:
            left = True
            for timer in timers:
                timer.cancel()
            for number in set(SIGNALS) - echoing:  # a duplicate would kill the process during shutdown
                loop.remove_signal_handler(number)
