"""Which answers say what the truth does; the pairs that need computer algebra are in tests/sandbox/test_verify.py."""

import random
import time
from collections.abc import Sequence

import pytest

from rstar_ray.reward.maths import Pair, equal_nodes, same_mathematics
from rstar_ray.reward.numbers import split_unit, written_number
from rstar_ray.reward.structure import structure
from tests.rstar_ray.reward.pairs import DIFFERENT, SAME


def by_rules(answer: str, truth: str) -> tuple[bool, bool]:
    """(verdict where every open pair is equal, verdict where none is)."""
    from rstar_ray.reward.latex import one_spelling

    given, wanted = structure(one_spelling(answer)), structure(one_spelling(truth))
    return equal_nodes(given, wanted, lambda *_: True), equal_nodes(given, wanted, lambda *_: False)


async def never(pairs: Sequence[Pair]) -> Sequence[bool]:
    raise AssertionError(f"asked for {pairs}")


def test_there_are_enough_pairs_and_most_are_decided_without_computer_algebra():
    assert len(SAME) >= 100 and len(DIFFERENT) >= 100 and len({*SAME, *DIFFERENT}) == len(SAME) + len(DIFFERENT)
    decided = [len(set(by_rules(*pair))) == 1 for pair in [*SAME, *DIFFERENT]]
    assert sum(decided) > 0.8 * len(decided)


@pytest.mark.parametrize("wanted", [True, False])
def test_no_rule_decides_against_a_pair(wanted: bool):
    wrong = [pair for pair in (SAME if wanted else DIFFERENT) if wanted not in by_rules(*pair)]
    assert not wrong


@pytest.mark.parametrize(
    "answer",
    ["2+3", "\\binom{50}{25}", "\\sum_{k=1}^{100} k", "5=6=7", "5\\%", "\\frac{10}{2}", "\\sqrt{25}", "5!", "-(-5)"],
)
@pytest.mark.parametrize("truth", ["5", "126410606437752", "5050", "7", "0.05", "120"])
async def test_a_number_must_be_written_out_and_the_checker_is_not_even_asked(answer: str, truth: str):
    assert await same_mathematics(answer, truth, never) is ((answer, truth) == ("5\\%", "5"))


async def test_what_the_rules_leave_open_is_asked_for_once_in_all_orders():
    asked: list[Sequence[Pair]] = []

    async def compare(pairs: Sequence[Pair]) -> Sequence[bool]:
        asked.append(pairs)
        return [pair in {("\\sqrt{12}", "2\\sqrt{3}"), ("\\sqrt{8}", "2\\sqrt{2}")} for pair in pairs]

    assert await same_mathematics("\\sqrt{12}, \\sqrt{8}", "2\\sqrt{2}, 2\\sqrt{3}", compare)
    assert len(asked) == 1 and len(asked[0]) == 4


async def test_long_and_hostile_answers_end_soon():
    rng = random.Random(0)
    hostile = ["(" * 1_999, "\\frac{" * 300, "1," * 999, "{" * 1_000 + "}" * 999, "9" * 2_000, "x=" * 999, "\\pm" * 600]
    hostile += [
        "".join(rng.choice("()[]{}\\,1x=+^_ $&%<>\n\\text{and} \\cup") for _ in range(1_990)) for _ in range(20)
    ]

    async def different(pairs: Sequence[Pair]) -> Sequence[bool]:
        return [False] * len(pairs)

    for answer in hostile:
        started_s = time.process_time()
        for truth in ("5", "x^2", "1,2,3", "(1,2]", "\\sqrt{2}"):
            assert not await same_mathematics(answer, truth, different)
        assert time.process_time() - started_s < 1.0, answer[:40]


def test_numbers_are_exact_whatever_their_form():
    found = written_number("0.1\\overline{6}")
    assert found is not None and (found.value.numerator, found.value.denominator) == (1, 6)
    assert written_number("1e999999") is None and written_number("9" * 10_000) is None
    assert written_number("1/0") is None and written_number("٣") is None
    assert split_unit("12\\text{ square centimeters}") == ("12", "centimeter^2")
    assert split_unit("5x") == ("5x", "")  # a single letter is a variable
