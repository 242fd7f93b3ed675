"""Work that a run does not depend on, such as sinks of metrics: a failure is logged, and the run continues."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from rstar_ray.errors import first_line

log = logging.getLogger(__name__)


@contextmanager
def best_effort(what: str) -> Generator[None, None, None]:
    """Log an exception of the block as a warning. A cancellation and the user's interrupt pass through."""
    try:
        yield
    except Exception as failed:
        log.warning("%s is skipped: %s", what, first_line(failed), exc_info=True)
