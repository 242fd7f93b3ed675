"""Ctrl-C, or a cluster's SIGTERM: the first asks for a checkpoint and a clean end, the second ends at once."""

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rstar_ray.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Whether the run has been asked to stop; within `handled` the signals come here."""

    def __init__(self, grace_s: float, show: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._show = show
        self._asked = 0

    def asked(self) -> bool:
        return self._asked > 0

    @contextmanager
    def handled(self) -> Generator[None, None, None]:
        """Raises `Stopped` where the task that enters it is ended by a second signal, or because grace ran out."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "entered in a task"
        timers: list[asyncio.TimerHandle] = []

        def received(name: str) -> None:
            self._asked += 1
            if self._asked == 1:
                self._show(
                    f"{name}: the run ends after the step under way, with a checkpoint, in {self._grace_s:g} s at most"
                    "; once more ends it at once"
                )
                timers.append(loop.call_later(self._grace_s, task.cancel))
            else:
                task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, received, number.name)
        try:
            yield
        except asyncio.CancelledError:
            if not self._asked:
                raise
            task.uncancel()
            raise Stopped("stopped in the middle of a step, without a new checkpoint") from None
        finally:
            for timer in timers:
                timer.cancel()
            for number in SIGNALS:
                loop.remove_signal_handler(number)
