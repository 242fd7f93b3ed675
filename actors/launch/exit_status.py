"""The end of a command: exit status, one line on the console, and the traceback in the run's log."""

import logging
import sys
from collections.abc import Callable

from rstar_ray.errors import ConfigError, NothingLearned, RStarError, Stopped
from rstar_ray.logs import console_logging
from rstar_ray.run_dir.durable import NO_ROOM

log = logging.getLogger(__name__)


def status_of(act: Callable[[], int | None], *, interrupted: str = "") -> int:
    """Run `act` with logging to the console; returns the exit status.

    0 or the status that `act` returns, 1 failed, 2 refused before anything started, 3 ended because steps in a row had
    no usable update, 130 stopped by the user. `interrupted` is logged if Ctrl-C ends it.
    """
    with console_logging():
        status = _status_of(act, interrupted)
    if (known := sys.modules.get("actors.health.head")) is not None:  # otherwise Ray was not started
        known.Ending.status = status
    return status


def end(status: int) -> None:
    """Exit the process with this status, if it is not 0."""
    if status:
        sys.exit(status)


def _status_of(act: Callable[[], int | None], interrupted: str) -> int:
    try:
        return act() or 0
    except ConfigError as refused:
        return _ended(refused, 2)
    except Stopped as stopped:
        log.warning("%s; the same command resumes it", stopped)
        return 130
    except NothingLearned as ended:
        return _ended(ended, 3)
    except RStarError as failed:
        return _ended(failed, 1)
    except Exception as failed:
        if isinstance(failed, OSError) and failed.errno in NO_ROOM:
            return _ended(failed, 1, f"{failed}; free space, then run the same command")
        if _of_a_lost_actor(failed):
            return _ended(failed, 1, f"{type(failed).__name__}: {' '.join(str(failed).split())}")
        _ended(failed, 1, f"unexpected {type(failed).__name__}: {failed}")
        raise
    except KeyboardInterrupt:
        if interrupted:
            log.warning(interrupted)
        return 130


def _of_a_lost_actor(failed: Exception) -> bool:
    """Whether it is Ray's error for an actor that died; False if Ray is not imported."""
    known = sys.modules.get("ray.exceptions")
    return known is not None and isinstance(failed, known.RayActorError)


def _ended(failed: BaseException, status: int, line: str = "") -> int:
    """Log one line for the console, and the traceback for the log file.

    The text of a Ray actor's error is a traceback; its cause is logged instead.
    """
    cause = getattr(failed, "cause", None)
    log.error(line or str(cause if isinstance(cause, Exception) else failed), exc_info=failed)
    return status
