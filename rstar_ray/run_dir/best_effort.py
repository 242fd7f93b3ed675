"""What shows or records a run and is not worth the run: where it fails, a line says so and the run goes on."""

from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def best_effort(what: str, show: Callable[[str], None]) -> Generator[None, None, None]:
    """Around a picture, a record or a sink of figures. A cancellation and the user's interrupt pass through.

    >>> with best_effort("the picture", print):
    ...     raise OSError("no space left on device")
    the picture is left out: OSError: no space left on device
    """
    try:
        yield
    except Exception as failed:
        lines = str(failed).strip().splitlines()
        reason = f"{type(failed).__name__}: {lines[0]}" if lines else type(failed).__name__
        show(f"{what} is left out: {reason}")
