"""Which answers are equal to the truth without computer algebra; the others are in tests/sandbox/test_verify.py."""

from collections.abc import Sequence
from fractions import Fraction

import pytest

from rstar_ray.reward.maths import Pair, decide, number, same_mathematics
from tests.rstar_ray.reward.pairs import DIFFERENT, SAME
from tests.rstar_ray.test_linear_time import grows_too_fast


async def never(pairs: Sequence[Pair]) -> Sequence[bool]:
    raise AssertionError(f"asked for {pairs}")


def test_the_guard_decides_no_pair_wrongly():
    assert len({*SAME, *DIFFERENT}) == len(SAME) + len(DIFFERENT) >= 500
    assert [pair for pair in SAME if decide(*pair) is False] == []
    assert [pair for pair in DIFFERENT if decide(*pair) is True] == []


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("2+3", "5"),
        ("\\binom{50}{25}", "126410606437752"),
        ("\\sum_{k=1}^{100} k", "5050"),
        ("\\sqrt{25}", "5"),
        ("10/2", "5"),
        ("5!", "120"),
        ("\\sqrt{3}+\\sqrt{3}", "2\\sqrt{3}"),
        ("x^{99999999}", "x^2"),
        ("the answer is clearly x plus one", "x+1"),
    ],
)
async def test_work_left_to_the_checker_and_prose_never_reach_it(answer: str, truth: str):
    assert not await same_mathematics(answer, truth, never)


@pytest.mark.parametrize(
    "part",
    ["(", "\\frac{", "1,", "{", "}", "9", "x=", "\\pm", " ", "\\text{", "^{", "a ", "1 ", "\\left", "=(", "-", "_1"],
)
def test_a_hostile_answer_costs_time_in_proportion_to_its_length(part: str):
    def read(text: str) -> None:
        for truth in ("5", "x^2", "(1,2]"):
            decide(text, truth)

    for end in ("", "!"):
        assert grows_too_fast(read, lambda size, end=end: (part * size)[: size - len(end)] + end) == ""


def test_numbers_are_exact_in_every_spelling():
    assert number("0.1\\overline{6}") == Fraction(1, 6) and number("-\\frac{3}{4}") == Fraction(-3, 4)
    assert number("1 234 567") == 1_234_567 and number("1.2e3") == 1_200 and number("1 1/2") == Fraction(3, 2)
    assert number("1e999999") is None and number("1/0") is None and number("3 8/2") is None
