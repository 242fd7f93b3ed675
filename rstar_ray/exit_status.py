"""The exit statuses of all commands except `python -m sandbox`, and the last line that a command prints.

0 done, or the status that the command returns; 1 failed; 2 refused before anything started; 3 ended because steps in a
row had no usable update; 130 stopped by the user.
"""

import sys
from collections.abc import Callable

from rstar_ray.errors import ConfigError, NothingLearned, RStarError, Stopped
from rstar_ray.run_dir.durable import NO_ROOM

DONE, FAILED, REFUSED, NO_USABLE_UPDATE, STOPPED = 0, 1, 2, 3, 130


def is_stop(ended: BaseException) -> bool:
    """Whether the user or the cluster ended the command; otherwise it failed or was refused."""
    return isinstance(ended, Stopped | KeyboardInterrupt)


def print_end(line: str, ended: BaseException) -> None:
    print(line if is_stop(ended) else f"error: {line}", file=sys.stderr, flush=True)


def is_os_error(failed: Exception) -> bool:
    return isinstance(failed, OSError)


def exit_status_of(
    act: Callable[[], int | None],
    *,
    report: Callable[[str, BaseException], None] = print_end,
    interrupted: str = "",
    expected: Callable[[Exception], bool] = is_os_error,
) -> int:
    """Run `act`; returns the exit status.

    `report` is called with the line and the exception that ended the command; `interrupted` is the line for Ctrl-C, and
    without it Ctrl-C is not reported. An exception that is neither of this project nor `expected` is raised again.
    """
    try:
        return act() or DONE
    except KeyboardInterrupt as stop:
        if interrupted:
            report(interrupted, stop)
        return STOPPED
    except Stopped as stop:
        report(f"{stop}; the same command resumes it", stop)
        return STOPPED
    except ConfigError as refused:
        report(_line(refused), refused)
        return REFUSED
    except RStarError as failed:
        report(_line(failed), failed)
        return NO_USABLE_UPDATE if isinstance(failed, NothingLearned) else FAILED
    except Exception as failed:
        if isinstance(failed, OSError) and failed.errno in NO_ROOM:
            report(f"{failed}; free space, then run the same command", failed)
        elif expected(failed):
            report(f"{type(failed).__name__}: {' '.join(str(failed).split())}", failed)
        else:
            report(f"unexpected {type(failed).__name__}: {failed}", failed)
            raise
        return FAILED


def _line(failed: Exception) -> str:
    """Its message. That of a Ray actor's error is a traceback; its cause is named instead."""
    cause = getattr(failed, "cause", None)
    return str(cause if isinstance(cause, Exception) else failed)
