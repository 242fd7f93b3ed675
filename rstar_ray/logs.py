"""Logging of a command and of its actors. A module logs through `logging.getLogger(__name__)`.

The console gets readable lines without time or level. The run directory's `logs/driver.log` gets every record with
time, level, component and traceback. Actors buffer their records, and their heartbeats carry them to the driver.
"""

import contextlib
import copy
import logging
import sys
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("rstar_ray", "actors", "sandbox", "scheduler", "recipes")
"""Packages whose loggers show INFO; those of other packages show only warnings."""
DRIVER = "driver"
BUFFERED_RECORDS = 1_000
"""Records that an actor keeps until its next heartbeat; older ones are dropped."""


class _Console(logging.Handler):
    """Messages as lines: errors to stderr, all others to stdout. A failed write does not end the run."""

    def emit(self, record: logging.LogRecord) -> None:
        component, line = _component(record), _message(record)
        if component != DRIVER:
            line = f"{component}: {line}"
        if record.exc_info and not _ours(record) and not _log_files():  # otherwise the traceback would be lost
            line += "\n" + logging.Formatter().formatException(record.exc_info)
        failed = record.levelno >= logging.ERROR
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            print(f"error: {line}" if failed else line, file=sys.stderr if failed else sys.stdout, flush=True)


class _LogFile(logging.FileHandler):
    """`2026-01-31 12:00:00,123 WARNING generation/0 actors.generation.worker: message`, then the traceback."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(component)s %(name)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.component = _component(record)
        record.msg, record.args = _message(record), None
        return super().format(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error, so that a full disk does not end the run."""


class RecordBuffer(logging.Handler):
    """The records of an actor's process since the last `take`; one per process."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[logging.LogRecord] = deque(maxlen=BUFFERED_RECORDS)

    def install(self) -> None:
        """Buffer this process's records from now on; they also go to stderr, which Ray stores in a file."""
        _log_everything()
        for package in PACKAGES:
            logger = logging.getLogger(package)
            logger.addHandler(self)
            logger.addHandler(logging.StreamHandler())

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(_picklable(record))

    def take(self) -> tuple[logging.LogRecord, ...]:
        with self.lock or contextlib.nullcontext():  # a probe and a log call may run in different threads
            records = tuple(self._records)
            self._records.clear()
        return records


def relay(records: Iterable[logging.LogRecord], component: str) -> None:
    """Log an actor's records in this process."""
    for record in records:
        record.component = component
        logging.getLogger(record.name).handle(record)


@contextmanager
def console_logging() -> Generator[None, None, None]:
    """Send records to the console, and to the file that `log_to` opens."""
    _log_everything()
    console = _Console()
    logging.getLogger().addHandler(console)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(console)
        _close_log_file()


def log_to(path: Path) -> None:
    """Append every record to this file too, until `console_logging` ends or another file takes its place.

    If it cannot be opened, the command continues without it.
    """
    _close_log_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path)
    except OSError as refused:
        logging.getLogger(__name__).warning("%s cannot be written: %s", path, refused.strerror or refused)
        return
    logging.getLogger().addHandler(handler)


def _close_log_file() -> None:
    for handler in _log_files():
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


def _log_files() -> list[_LogFile]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _LogFile)]


def _ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in PACKAGES


def _log_everything() -> None:
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)


def _component(record: logging.LogRecord) -> str:
    return getattr(record, "component", DRIVER)


def _message(record: logging.LogRecord) -> str:
    """The formatted message; the raw message and the error if formatting fails."""
    try:
        return record.getMessage()
    except Exception as wrong:  # of any kind: arguments format themselves
        return f"{record.msg} (cannot be formatted: {wrong})"


def _picklable(record: logging.LogRecord) -> logging.LogRecord:
    """The record with its message and its traceback as text."""
    record = copy.copy(record)
    record.msg, record.args = _message(record), None
    if record.exc_info:
        record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        record.exc_info = None
    return record
