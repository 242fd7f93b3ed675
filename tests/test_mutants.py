import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mutants.changes import Mutant, changes, mutant
from mutants.swap import loaded, swaps


def shown(source: str) -> list[str]:
    found = changes(ast.parse(source))
    return [mutant("a.py", source, at, i).change for at, (_, news) in enumerate(found) for i in range(len(news))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a < b -> a <= b", "a < b -> a >= b"]),
        ("a < b < c", ["a < b < c -> a <= b < c", "a < b < c -> a < b <= c"]),
        ("a + b * c", ["a + b * c -> a - b * c", "b * c -> b / c"]),
        ("f(2)", ["f(2) -> f(3)", "f(2) -> f(1)"]),
        ("f(-x)", ["-x -> x"]),
        ("a and not b", ["a and (not b) -> a or not b", "not b -> b"]),
        ("x = True", ["x = True -> x = False"]),
        ("max(a, b)", ["max(a, b) -> min(a, b)"]),
        ("if a:\n    pass", ["if a: -> if not a:"]),
        ("[x for x in y if x]", ["for x in y if x -> for x in y if not x"]),
        ("for x in y:\n    break", ["break -> continue"]),
    ],
)
def test_a_change_is_one_sign_comparison_number_or_condition(source: str, expected: list[str]):
    assert shown(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "def f(x: int | None = a) -> list[int] | None: ...",
        '"""A text + 1."""',
        "def __repr__(self):\n    return 1 + 1",
        "if TYPE_CHECKING:\n    x = 1",
        "assert a < 1",
        "zip(a, b, strict=True)",
        "@dataclass(frozen=True)\nclass A: ...",
        "log.info(f'{a + 1}')",
        "ax.plot(x, y, linewidth=2)",
        "f'{a:.2f}'",
    ],
)
def test_what_says_nothing_that_a_test_could_notice_is_left_alone(source: str):
    assert shown(source) == []


def test_a_change_knows_its_function_its_line_and_the_names_it_defines():
    source = (
        "LEAST = 3\n\nclass A:\n    size: int = 4\n    def f(self):\n        def inner():\n            return a + b\n"
    )
    ones = [mutant("a.py", source, at, 0) for at in range(3)]
    assert [(one.line, one.function, one.names) for one in ones] == [
        (1, "", {"LEAST"}),
        (4, "", {"size"}),
        (7, "A.f", frozenset()),
    ]
    assert "return a - b" in ones[2].source and "LEAST = 3" in ones[2].source


# -- the loaded function becomes the changed one -----------------------------------------------------------------------

SOURCE = """
import functools

class Scale:
    def __init__(self, by=2):
        self._by = by

    @property
    def by(self):
        return self._by + 0

    @by.setter
    def by(self, value):
        self._by = value * 1

    def many(self, values):
        def one(value):
            return value * self._by + 1
        return [one(value) for value in values]

@functools.cache
def least(a, b):
    return min(a, b)

def counter():
    def step(value):
        return value + 5
    return step

step = counter()
"""


def load(path: Path) -> ModuleType:
    path.write_text(SOURCE)
    module = ModuleType("scale")
    exec(compile(SOURCE, str(path), "exec"), module.__dict__)
    return module


def change_of(words: str) -> Mutant:
    found = changes(ast.parse(SOURCE))
    ones = [mutant("scale.py", SOURCE, at, which) for at, (_, news) in enumerate(found) for which in range(len(news))]
    return next(one for one in ones if one.change == words)


@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        ("self._by + 0 -> self._by + 1", (2, [7], 3, 8), (3, [7], 3, 8)),
        ("value * 1 -> value * 2", (2, [7], 3, 8), (2, [7], 3, 16)),
        ("value * self._by + 1 -> value * self._by - 1", (2, [7], 3, 8), (2, [5], 3, 8)),
        ("min(a, b) -> max(a, b)", (2, [7], 3, 8), (2, [7], 4, 8)),
    ],
)
def test_a_loaded_function_gets_the_code_of_the_changed_one(tmp_path: Path, words: str, before: Any, after: Any):
    path, one = tmp_path / "scale.py", change_of(words)
    module = load(path)

    def figures() -> tuple[int, list[int], int, int]:
        module.least.cache_clear()
        scale, other = module.Scale(), module.Scale()
        other.by = 8
        return scale.by, scale.many([3]), module.least(3, 4), other._by

    assert figures() == before
    new = swaps(str(path), SOURCE, one.source, one.function, loaded(str(tmp_path))[str(path), one.function])
    for function, code in new:
        function.__code__ = code
    assert len(new) == 1 and figures() == after


@pytest.mark.parametrize(
    "words", ["def __init__(self, by=2): -> def __init__(self, by=3):", "value + 5 -> value + 6", "not loaded"]
)
def test_a_default_and_what_ran_while_importing_must_be_imported_again(tmp_path: Path, words: str):
    path = tmp_path / "scale.py"
    module = load(path)
    one = change_of("min(a, b) -> max(a, b)" if words == "not loaded" else words)
    live = loaded(str(tmp_path))[str(path), one.function]
    assert live and module.step(1) == 6
    assert swaps(str(path), SOURCE, one.source, one.function, [] if words == "not loaded" else live) == []
