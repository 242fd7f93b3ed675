"""Work that a run does not depend on, such as sinks of metrics: a failure is logged, and the run continues."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def best_effort(what: str) -> Generator[None, None, None]:
    """Log an exception of the block as a warning. A cancellation and the user's interrupt pass through."""
    try:
        yield
    except Exception as failed:
        lines = str(failed).strip().splitlines()
        reason = f"{type(failed).__name__}: {lines[0]}" if lines else type(failed).__name__
        log.warning("%s is skipped: %s", what, reason, exc_info=True)
