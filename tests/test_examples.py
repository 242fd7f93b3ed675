"""The examples in docstrings run, and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = [
    path for room in ("rstar_ray", "sandbox", "scheduler", "recipes") for path in (REPOSITORY / room).rglob("*.py")
]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in FILES if ">>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_give_what_they_show(module: str):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed
