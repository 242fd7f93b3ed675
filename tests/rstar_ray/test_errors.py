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


def test_a_long_message_keeps_its_begin_and_its_end():
    text = one_line(OSError("ray::call() failed\n" + 200 * "File x\n" + "ValueError: no room"))
    assert text.startswith("OSError: ray::call() failed") and text.endswith("ValueError: no room") and len(text) < 330
