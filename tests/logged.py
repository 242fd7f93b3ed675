"""What the product logs, for tests whose subject is a line that people read."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rstar_ray.logs import PACKAGES


class Logged(list[str]):
    """The messages of the product's log records, in order; each of `listeners` is called with each message."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[str], object]] = []


class _Handler(logging.Handler):
    def __init__(self, lines: Logged) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        component = getattr(record, "component", "")
        line = f"{component}: {record.getMessage()}" if component else record.getMessage()
        self._lines.append(line)
        for listener in self._lines.listeners:
            listener(line)


@contextmanager
def logged_lines() -> Generator[Logged, None, None]:
    lines = Logged()
    handler = _Handler(lines)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
        logging.getLogger(package).addHandler(handler)
    try:
        yield lines
    finally:
        for package in PACKAGES:
            logging.getLogger(package).removeHandler(handler)
