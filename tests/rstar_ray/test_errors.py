"""Errors as text."""

import pytest

from rstar_ray.errors import first_line, last_line, one_line

TRACEBACK = "ray::call() (pid=7)\n  File x\nValueError: no room\n"


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ValueError(), ("ValueError", "ValueError", "ValueError")),
        (ValueError(" \n "), ("ValueError", "ValueError", "ValueError")),
        (ValueError("no room"), ("ValueError: no room", "ValueError: no room", "no room")),
        (
            OSError(TRACEBACK),
            ("OSError: ray::call() (pid=7) File x ValueError: no room", "OSError: ray::call() (pid=7)",
             "ValueError: no room"),
        ),
    ],
)  # fmt: skip
def test_an_error_with_or_without_a_message_is_one_line(error: Exception, lines: tuple[str, str, str]):
    assert (one_line(error), first_line(error), last_line(error)) == lines
