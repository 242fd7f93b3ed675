"""How a command ends: a status, and one line for what a person can mend."""

import sys
from collections.abc import Callable

from rstar_ray.errors import ConfigError, RStarError, Stopped
from rstar_ray.run_dir.durable import NO_ROOM


def status_of(act: Callable[[], int | None], *, interrupted: str = "") -> int:
    """Run `act`; exit status: its own or 0, 1 it failed, 2 refused before anything started, 130 stopped by a person.

    `interrupted` is said where Ctrl-C ends it.
    """
    status = _status_of(act, interrupted)
    if (known := sys.modules.get("actors.health.head")) is not None:  # else there is no Ray that could hold its end up
        known.Ending.status = status
    return status


def _status_of(act: Callable[[], int | None], interrupted: str) -> int:
    try:
        return act() or 0
    except ConfigError as refused:
        return _complain(refused, 2)
    except Stopped as stopped:
        return _complain(f"{stopped}; the same command goes on", 130)
    except RStarError as failed:
        return _complain(failed, 1)
    except OSError as failed:
        if failed.errno not in NO_ROOM:
            raise
        return _complain(f"{failed}; make room, and the same command goes on", 1)
    except Exception as failed:
        if not _of_a_lost_actor(failed):
            raise
        return _complain(f"{type(failed).__name__}: {' '.join(str(failed).split())}", 1)
    except KeyboardInterrupt:
        return _complain(interrupted, 130) if interrupted else 130


def _of_a_lost_actor(failed: Exception) -> bool:
    """Ray's own error for an actor that died; where Ray is not imported there is none."""
    known = sys.modules.get("ray.exceptions")
    return known is not None and isinstance(failed, known.RayActorError)


def _complain(what: object, status: int) -> int:
    cause = getattr(what, "cause", None)  # of what an actor raised; Ray's own text is its traceback
    print(f"error: {cause if isinstance(cause, Exception) else what}", file=sys.stderr, flush=True)
    return status
