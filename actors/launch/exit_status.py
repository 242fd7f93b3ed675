"""The end of a command: exit status, one line on the console, and the traceback in the run's log."""

import logging
import sys
from collections.abc import Callable

from rstar_ray.errors import ConfigError, RStarError, Stopped
from rstar_ray.logs import console_logging
from rstar_ray.run_dir.durable import NO_ROOM

log = logging.getLogger(__name__)


def status_of(act: Callable[[], int | None], *, interrupted: str = "") -> int:
    """Run `act` with logging to the console; exit status: its own or 0, 1 it failed, 2 refused before anything started,
    130 stopped by the user.

    `interrupted` is logged where Ctrl-C ends it.
    """
    with console_logging():
        status = _status_of(act, interrupted)
    if (known := sys.modules.get("actors.health.head")) is not None:  # else there is no Ray that could hold its end up
        known.Ending.status = status
    return status


def end(status: int) -> None:
    """Exit the process with this status, where it is not 0."""
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
    """Ray's own error for an actor that died; where Ray is not imported there is none."""
    known = sys.modules.get("ray.exceptions")
    return known is not None and isinstance(failed, known.RayActorError)


def _ended(failed: BaseException, status: int, line: str = "") -> int:
    """Log one line for the console, and the traceback for the log file; Ray's text of an actor's error is a traceback,
    so that its cause is the line."""
    cause = getattr(failed, "cause", None)
    log.error(line or str(cause if isinstance(cause, Exception) else failed), exc_info=failed)
    return status
