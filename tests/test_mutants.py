import ast

import pytest
from mutants.changes import changes, mutant


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
