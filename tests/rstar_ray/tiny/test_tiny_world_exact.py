"""The tiny world to the letter: what is asked, how hard, and what the teacher says. Recorded runs rest on it."""

import hashlib
import json
import random
from collections import Counter
from dataclasses import astuple
from typing import Any

import pytest

from rstar_ray.tiny.conversations import ConversationMix, draft_conversations, draft_drill
from rstar_ray.tiny.problems import FAMILIES, MAX_PROBLEMS, Numbers, Question, Split, generate_problems

BY_NAME = {family.name: family for family in FAMILIES}
NUMBER = [(3, 20), (11, 60), (21, 99)]  # of one to two digits, by difficulty
SMALL = [(2, 9), (3, 12), (11, 25)]
ONE = [(5, 40), (41, 99), (100, 300)]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]


def drawn(name: str, difficulty: int) -> list[Numbers]:
    rng = random.Random(difficulty)
    return [BY_NAME[name].draw(rng, difficulty) for _ in range(2_500)]


def span(values: list[int]) -> tuple[int, int]:
    return min(values), max(values)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_numbers_are_as_large_as_their_difficulty_says(difficulty: int):
    number, small, one = NUMBER[difficulty - 1], SMALL[difficulty - 1], ONE[difficulty - 1]
    for name in ("sum", "difference", "perimeter"):
        a, b, c = map(list, zip(*drawn(name, difficulty), strict=True))
        assert (span(a), span(b), span(c)) == (number, number, (0, 0))
    a, b, _ = map(list, zip(*drawn("product", difficulty), strict=True))
    assert (span(a), span(b)) == (number, small)
    for name in ("odd_sum", "divisors", "primes"):
        assert span([n.a for n in drawn(name, difficulty)]) == one
    a, b, c = map(list, zip(*drawn("bags", difficulty), strict=True))
    assert (span(a), span(b)) == (small, small)
    assert all(1 <= eaten < bags * each for bags, each, eaten in zip(a, b, c, strict=True))


@pytest.mark.parametrize(("difficulty", "factor", "top"), [(1, 4, 5), (2, 9, 8), (3, 15, 16)])
def test_common_factors_and_multiples_have_their_bounds(difficulty: int, factor: int, top: int):
    for name in ("gcd", "lcm"):
        pairs = [(n.a, n.b) for n in drawn(name, difficulty)]
        assert all(a != b for a, b in pairs)
        possible = {(f * x, f * y) for f in range(2, factor + 1) for x in range(2, top + 1) for y in range(2, top + 1)}
        assert set(pairs) <= possible
        assert max(a for a, _ in pairs) == factor * top and min(a for a, _ in pairs) == 4


@pytest.mark.parametrize(("difficulty", "base", "exponent"), [(1, (2, 9), (3, 5)), (2, (10, 17), (3, 4)),
                                                             (3, (18, 46), (3, 3))])  # fmt: skip
def test_powers_stay_within_five_digits(difficulty: int, base: tuple[int, int], exponent: tuple[int, int]):
    numbers = drawn("power", difficulty)
    assert (span([n.a for n in numbers]), span([n.b for n in numbers])) == (base, exponent)
    assert max(base) ** max(exponent) < 100_000


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_intervals_and_equations_have_their_bounds(difficulty: int):
    easier = min(difficulty, 2) - 1
    numbers = drawn("range_sum", difficulty)
    assert span([n.a for n in numbers]) == SMALL[difficulty - 1]
    assert span([n.b - n.a for n in numbers]) == NUMBER[easier]
    numbers = drawn("linear", difficulty)
    assert span([n.a for n in numbers]) == SMALL[easier]
    assert span([n.b - n.a for n in numbers]) == (0, (9, 30, 60)[difficulty - 1])
    assert span([(n.c - n.b) // n.a for n in numbers]) == SMALL[difficulty - 1]
    assert all((n.c - n.b) % n.a == 0 for n in numbers)


@pytest.mark.parametrize("name", ["remainder", "quotient"])
def test_quotient_and_remainder_never_pass_for_each_other(name: str):
    numbers = [n for difficulty in (1, 2, 3) for n in drawn(name, difficulty)]
    assert all(n.a // n.b != n.a % n.b for n in numbers)
    assert span([n.a for n in numbers]) == (3, 99) and span([n.b for n in numbers]) == (2, 25)


ANSWERS = {
    "sum": (Numbers(17, 25), 42), "difference": (Numbers(17, 25), -8), "product": (Numbers(17, 5), 85),
    "remainder": (Numbers(17, 5), 2), "quotient": (Numbers(17, 5), 3), "gcd": (Numbers(84, 126), 42),
    "lcm": (Numbers(4, 6), 12), "power": (Numbers(3, 5), 243), "range_sum": (Numbers(3, 7), 25),
    "odd_sum": (Numbers(8), 16), "divisors": (Numbers(12), 6), "primes": (Numbers(11), 5),
    "linear": (Numbers(3, 5, 26), 7), "bags": (Numbers(4, 6, 5), 19), "perimeter": (Numbers(3, 8), 22),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_answers_are_those_of_the_schoolbook(name: str):
    numbers, answer = ANSWERS[name]
    assert BY_NAME[name].answer(numbers) == answer


def test_a_tenth_of_all_questions_is_held_out_and_a_tenth_is_for_validation():
    family = BY_NAME["difference"]
    splits = Counter(Question(family, Numbers(a, b), 0, 1).split for a in range(100) for b in range(100))
    assert splits[Split.HELD_OUT] == pytest.approx(1_000, abs=60)
    assert splits[Split.VALIDATION] == pytest.approx(1_000, abs=60)
    question = Question(BY_NAME["sum"], Numbers(17, 25), 1, 2)
    assert (question.text, question.split, f"{question.fingerprint:016x}") == (
        "Add 17 and 25.", Split.TRAIN, "7d8f2a2f77814216")  # fmt: skip
    assert astuple(question.to_problem())[:3] == ("sum-7d8f2a2f77814216-1", "Add 17 and 25.", "42")


def test_as_many_problems_as_a_split_holds_may_be_asked_for():
    assert MAX_PROBLEMS == 10_000
    assert [len(generate_problems(0, "held_out", count)) for count in (0, 1, 31)] == [0, 1, 31]


def test_problems_of_a_seed_are_what_they_were():
    problems = {split.value: [p.problem + p.answer for p in generate_problems(7, split, 60)] for split in Split}
    assert {name: digest(texts) for name, texts in problems.items()} == {
        "train": "6466736c85df0059", "validation": "00c91c374e2e6130", "held_out": "de9b33da48a5fe69"}  # fmt: skip


def test_the_teachers_conversations_of_a_seed_are_what_they_were():
    drafts = draft_conversations(7, 400, ConversationMix(drills=0.2, mistakes=0.4, failures=0.3))
    assert digest([(draft.prompt, draft.codes, draft.reply) for draft in drafts]) == "4752059983db472f"
    assert digest([draft.prompt for draft in draft_conversations(0, 200, ConversationMix())]) == "b7fdf697156bf9b1"


def test_a_drill_repeats_two_to_seven_numbers_of_one_to_four_digits():
    rng = random.Random(0)
    drills = [draft_drill(rng) for _ in range(600)]
    numbers = [drill.reply.split() for drill in drills]
    assert span([len(row) for row in numbers]) == (2, 7)
    assert span([len(number) for row in numbers for number in row]) == (1, 4)
    assert all(drill.reply in drill.prompt and not drill.codes for drill in drills)
    assert len({drill.prompt.replace(drill.reply, "") for drill in drills}) == 3


def test_the_mix_of_the_teacher_is_the_one_that_was_measured():
    assert astuple(ConversationMix()) == (0.3, 0.55, 0.05)
    for share in (0, 1):
        assert ConversationMix(drills=share, mistakes=share, failures=share)
