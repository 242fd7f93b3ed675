"""The tiny world to the letter: what is asked, how hard, and what the teacher says. Recorded runs rest on it."""

import hashlib
import json
import random
from collections import Counter
from dataclasses import astuple
from typing import Any

import pytest

from rstar_ray.config import TinyConfig
from rstar_ray.tiny.conversations import draft_conversations, draft_drill
from rstar_ray.tiny.families import FAMILIES, Numbers
from rstar_ray.tiny.problems import MAX_PROBLEMS, Question, Split, generate_problems

BY_NAME = {family.name: family for family in FAMILIES}
NUMBER = [(3, 20), (11, 60), (21, 99)]  # of one to two digits, by size
SMALL = [(2, 9), (3, 12), (11, 25)]
ONE = [(5, 40), (41, 99), (100, 300)]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]


def drawn(name: str, size: int) -> list[Numbers]:
    rng = random.Random(size)
    return [BY_NAME[name].draw(rng, size) for _ in range(2_500)]


def span(values: list[int]) -> tuple[int, int]:
    return min(values), max(values)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_numbers_are_as_large_as_their_size_says(size: int):
    number, small, one = NUMBER[size - 1], SMALL[size - 1], ONE[size - 1]
    for name in ("sum", "difference", "perimeter"):
        a, b, c = map(list, zip(*drawn(name, size), strict=True))
        assert (span(a), span(b), span(c)) == (number, number, (0, 0))
    a, b, _ = map(list, zip(*drawn("product", size), strict=True))
    assert (span(a), span(b)) == (number, small)
    for name in ("odd_sum", "divisors", "primes"):
        assert span([n.a for n in drawn(name, size)]) == one
    a, b, c = map(list, zip(*drawn("bags", size), strict=True))
    assert (span(a), span(b)) == (small, small)
    assert all(1 <= eaten < bags * each for bags, each, eaten in zip(a, b, c, strict=True))


@pytest.mark.parametrize(("size", "factor", "top"), [(1, 4, 5), (2, 9, 8), (3, 15, 16)])
def test_common_factors_and_multiples_have_their_bounds(size: int, factor: int, top: int):
    for name in ("gcd", "lcm"):
        pairs = [(n.a, n.b) for n in drawn(name, size)]
        assert all(a != b for a, b in pairs)
        possible = {(f * x, f * y) for f in range(2, factor + 1) for x in range(2, top + 1) for y in range(2, top + 1)}
        assert set(pairs) <= possible
        assert max(a for a, _ in pairs) == factor * top and min(a for a, _ in pairs) == 4


@pytest.mark.parametrize(("size", "base", "exponent"), [(1, (2, 9), (3, 5)), (2, (10, 17), (3, 4)),
                                                             (3, (18, 46), (3, 3))])  # fmt: skip
def test_powers_stay_within_five_digits(size: int, base: tuple[int, int], exponent: tuple[int, int]):
    numbers = drawn("power", size)
    assert (span([n.a for n in numbers]), span([n.b for n in numbers])) == (base, exponent)
    assert max(base) ** max(exponent) < 100_000


@pytest.mark.parametrize("size", [1, 2, 3])
def test_intervals_and_equations_have_their_bounds(size: int):
    easier = min(size, 2) - 1
    numbers = drawn("range_sum", size)
    assert span([n.a for n in numbers]) == SMALL[size - 1]
    assert span([n.b - n.a for n in numbers]) == NUMBER[easier]
    numbers = drawn("linear", size)
    assert span([n.a for n in numbers]) == SMALL[easier]
    assert span([n.b - n.a for n in numbers]) == (0, (9, 30, 60)[size - 1])
    assert span([(n.c - n.b) // n.a for n in numbers]) == SMALL[size - 1]
    assert all((n.c - n.b) % n.a == 0 for n in numbers)


@pytest.mark.parametrize("name", ["remainder", "quotient"])
def test_quotient_and_remainder_never_pass_for_each_other(name: str):
    numbers = [n for size in (1, 2, 3) for n in drawn(name, size)]
    assert all(n.a // n.b != n.a % n.b for n in numbers)
    assert span([n.a for n in numbers]) == (3, 99) and span([n.b for n in numbers]) == (2, 25)


ANSWERS = {
    "sum": (Numbers(17, 25), 42), "difference": (Numbers(17, 25), -8), "product": (Numbers(17, 5), 85),
    "remainder": (Numbers(17, 5), 2), "quotient": (Numbers(17, 5), 3), "gcd": (Numbers(84, 126), 42),
    "lcm": (Numbers(4, 6), 12), "power": (Numbers(3, 5), 243), "range_sum": (Numbers(3, 7), 25),
    "odd_sum": (Numbers(8), 16), "divisors": (Numbers(12), 6), "primes": (Numbers(11), 5),
    "linear": (Numbers(3, 5, 26), 7), "bags": (Numbers(4, 6, 5), 19), "perimeter": (Numbers(3, 8), 22),
    "next_multiple": (Numbers(12, 4), 16), "rest_squared": (Numbers(17, 6), 25), "gcd_and_lcm": (Numbers(4, 6), 14),
    "product_digits": (Numbers(57, 8), 15), "product_divisors": (Numbers(3, 4), 6),
    "shared_bags": (Numbers(5, 7, 4), 3),
    "sum_quotient": (Numbers(20, 9, 4), 7), "product_rest_squared": (Numbers(5, 7, 4), 9),
    "square_digits": (Numbers(9, 8), 19), "lcm_divisors": (Numbers(4, 6, 4), 5),
    "difference_digits": (Numbers(17, 3, 7), 17),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_answers_are_those_of_the_schoolbook(name: str):
    numbers, answer = ANSWERS[name]
    assert BY_NAME[name].answer(numbers) == answer


def test_a_tenth_of_all_questions_is_held_out_and_three_are_for_sft():
    family = BY_NAME["difference"]
    splits = Counter(Question(family, Numbers(a, b), 0).split for a in range(100) for b in range(100))
    assert splits[Split.HELD_OUT] == pytest.approx(1_000, abs=60)
    assert splits[Split.SFT] == pytest.approx(3_000, abs=100)
    question = Question(BY_NAME["sum"], Numbers(17, 25), 1)
    assert (question.text, question.split, f"{question.fingerprint:016x}") == (
        "Add 17 and 25.", Split.TRAIN, "7d8f2a2f77814216")  # fmt: skip
    assert astuple(question.to_problem()) == ("sum-7d8f2a2f77814216-1", "Add 17 and 25.", "42", "sum", 1.0, "")
    hard = Question(BY_NAME["square_digits"], Numbers(9, 8), 0).to_problem()
    assert hard.problem == "Add 9 and 8, square it and add the digits." and hard.difficulty == 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_numbers_of_several_results_have_their_bounds(size: int):
    small = SMALL[size - 1]
    a, b, c = map(list, zip(*drawn("sum_quotient", size), strict=True))
    assert (span(a), span(b), span(c)) == (small, small, (3, 9))
    for name in ("shared_bags", "product_rest_squared"):
        a, b, c = map(list, zip(*drawn(name, size), strict=True))
        assert (span(a), span(b), span(c)) == (small, small, (4, 9))  # a rest above 2
        assert all(n.a * n.b % n.c > 2 for n in drawn(name, size))
    a, b, c = map(list, zip(*drawn("product_divisors", size), strict=True))
    assert (span(a), span(b), span(c)) == (small, small, (0, 0))
    differences = drawn("difference_digits", size)
    assert span([n.b for n in differences]) == small and span([n.a - n.b for n in differences]) == small
    assert span([n.c for n in differences]) == (3, 9)
    assert all(n.a % n.b > 2 for n in drawn("rest_squared", size))
    with_more = drawn("lcm_divisors", size)
    assert (max(n.a for n in with_more), span([n.c for n in with_more])) == ((20, 72, 72)[size - 1], (3, 9))


def test_as_many_problems_as_a_split_holds_may_be_asked_for():
    assert MAX_PROBLEMS == 10_000
    assert [len(generate_problems(0, "held_out", count)) for count in (0, 1, 31)] == [0, 1, 31]


def test_problems_of_a_seed_are_what_they_were():
    problems = {split.value: [p.problem + p.answer for p in generate_problems(7, split, 60)] for split in Split}
    assert {name: digest(texts) for name, texts in problems.items()} == {
        "train": "915cec6238049c45", "sft": "ba95f8faff7b2344", "held_out": "e7b1f145e9f3329c"}  # fmt: skip


def test_the_teachers_conversations_of_a_seed_are_what_they_were():
    drafts = draft_conversations(7, 400, TinyConfig(drills=0.2, slips=0.4, failures=0.3, wasted=0.2, coupling=0.1))
    assert digest([(draft.prompt, draft.failing, draft.calls, draft.reply) for draft in drafts]) == "42baa42090d17f9d"
    assert digest([draft.prompt for draft in draft_conversations(0, 200, TinyConfig())]) == "338065c14bac2754"


def test_a_drill_repeats_two_to_seven_numbers_of_one_to_four_digits():
    rng = random.Random(0)
    drills = [draft_drill(rng) for _ in range(600)]
    numbers = [drill.reply.split() for drill in drills]
    assert span([len(row) for row in numbers]) == (2, 7)
    assert span([len(number) for row in numbers for number in row]) == (1, 4)
    assert all(drill.reply in drill.prompt and not drill.calls for drill in drills)
    assert len({drill.prompt.replace(drill.reply, "") for drill in drills}) == 3


def test_the_teacher_is_the_one_that_was_measured():
    assert astuple(TinyConfig()) == (0.3, 0.5, 0.4, 0.05, 0.0)
