"""The end of a command that logs: one line on the console, the traceback in the run's log, and the exit status."""

import logging
import sys
from collections.abc import Callable

from rstar_ray.exit_status import exit_status_of, is_stop
from rstar_ray.logs import console_logging

log = logging.getLogger(__name__)


def status_of(act: Callable[[], int | None], *, interrupted: str = "") -> int:
    """Run `act` with logging to the console; returns the exit status (`rstar_ray.exit_status`).

    `interrupted` is logged if Ctrl-C ends it.
    """
    with console_logging():
        status = exit_status_of(act, report=_log_end, interrupted=interrupted, expected=_of_a_lost_actor)
    if (known := sys.modules.get("actors.health.head")) is not None:  # otherwise Ray was not started
        known.Ending.status = status
    return status


def end(status: int) -> None:
    """Exit the process with this status, if it is not 0."""
    if status:
        sys.exit(status)


def _log_end(line: str, ended: BaseException) -> None:
    """One line for the console, and the traceback for the log file."""
    if is_stop(ended):
        log.warning(line)
    else:
        log.error(line, exc_info=ended)


def _of_a_lost_actor(failed: Exception) -> bool:
    """Whether it is Ray's error for an actor that died; False if Ray is not imported."""
    known = sys.modules.get("ray.exceptions")
    return known is not None and isinstance(failed, known.RayActorError)
