"""The tiny world's problems: integer answers, 1 to 3 digit numbers, three difficulty levels, three disjoint splits."""

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rstar_ray.trajectory import Problem

DIFFICULTIES = (1, 2, 3)
MAX_PROBLEMS = 10_000
"""The smallest split has more, but small families run dry before it."""


class Split(StrEnum):
    """Which part of the world a question belongs to; decided by the question alone."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


class Numbers(NamedTuple):
    """What a question is asked about; families with fewer numbers leave the rest at 0."""

    a: int
    b: int = 0
    c: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of question.

    `phrasings` hold `{a}`, `{b}`, `{c}`; `draw(rng, difficulty)` gives the numbers; `answer` is the truth,
    computed without the code that a policy is shown. A family commutes where a and b may change places.
    """

    name: str
    phrasings: tuple[str, ...]
    draw: Callable[[random.Random, int], Numbers]
    answer: Callable[[Numbers], int]
    commutes: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """One family with its numbers, in one of its phrasings."""

    family: Family
    numbers: Numbers
    phrasing: int
    difficulty: int

    @property
    def text(self) -> str:
        return self.family.phrasings[self.phrasing].format(**self.numbers._asdict())

    @property
    def fingerprint(self) -> int:
        """64 bits of what is asked, the same in every phrasing."""
        return _fingerprint(self.family, self.numbers)

    @property
    def split(self) -> Split:
        """80 % train, 10 % validation, 10 % held out; neither a rewording nor an order of operands crosses over."""
        first, second, third = self.numbers
        ordered = Numbers(min(first, second), max(first, second), third) if self.family.commutes else self.numbers
        bucket = _fingerprint(self.family, ordered) % 10
        if bucket == 0:
            return Split.HELD_OUT
        return Split.VALIDATION if bucket == 1 else Split.TRAIN

    def to_problem(self) -> Problem:
        return Problem(
            id=f"{self.family.name}-{self.fingerprint:016x}-{self.phrasing}",
            problem=self.text,
            answer=str(self.family.answer(self.numbers)),
            family=self.family.name,
            difficulty=float(self.difficulty),
        )


def _fingerprint(family: Family, numbers: Numbers) -> int:
    key = f"{family.name} {numbers.a} {numbers.b} {numbers.c}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def _number(rng: random.Random, difficulty: int) -> int:
    """Two digits from the second difficulty on."""
    low, high = ((3, 20), (11, 60), (21, 99))[difficulty - 1]
    return rng.randint(low, high)


def _small(rng: random.Random, difficulty: int) -> int:
    """A second number that stays below most first ones."""
    low, high = ((2, 9), (3, 12), (11, 25))[difficulty - 1]
    return rng.randint(low, high)


def _two(rng: random.Random, difficulty: int) -> Numbers:
    return Numbers(_number(rng, difficulty), _number(rng, difficulty))


def _large_and_small(rng: random.Random, difficulty: int) -> Numbers:
    return Numbers(_number(rng, difficulty), _small(rng, difficulty))


def _division(rng: random.Random, difficulty: int) -> Numbers:
    """Quotient and remainder differ, so that neither passes for the other."""
    numbers = _large_and_small(rng, difficulty)
    while numbers.a // numbers.b == numbers.a % numbers.b:
        numbers = _large_and_small(rng, difficulty)
    return numbers


def _common_factor(rng: random.Random, difficulty: int) -> Numbers:
    factor = rng.randint(2, (4, 9, 15)[difficulty - 1])
    top = (5, 8, 16)[difficulty - 1]
    first, second = rng.sample(range(2, top + 1), 2)
    return Numbers(factor * first, factor * second)


def _power(rng: random.Random, difficulty: int) -> Numbers:
    """Powers of at most five digits."""
    base, exponent = (((2, 9), (3, 5)), ((10, 17), (3, 4)), ((18, 46), (3, 3)))[difficulty - 1]
    return Numbers(rng.randint(*base), rng.randint(*exponent))


def _interval(rng: random.Random, difficulty: int) -> Numbers:
    first = _small(rng, difficulty)
    return Numbers(first, first + _number(rng, min(difficulty, 2)))


def _one(rng: random.Random, difficulty: int) -> Numbers:
    """A single number may have three digits; a quadratic search still counts up to it at once."""
    return Numbers(rng.randint(*((5, 40), (41, 99), (100, 300))[difficulty - 1]))


def _linear(rng: random.Random, difficulty: int) -> Numbers:
    """a * x + b = c with a whole x and b >= a, so that a sign slip changes the answer."""
    slope = _small(rng, min(difficulty, 2))
    offset = slope + rng.randint(0, (9, 30, 60)[difficulty - 1])
    return Numbers(slope, offset, slope * _small(rng, difficulty) + offset)


def _bags(rng: random.Random, difficulty: int) -> Numbers:
    bags, each = _small(rng, difficulty), _small(rng, difficulty)
    return Numbers(bags, each, rng.randint(1, bags * each - 1))


def _count_primes(limit: int) -> int:
    return sum(1 for n in range(2, limit + 1) if all(n % d for d in range(2, math.isqrt(n) + 1)))


FAMILIES: tuple[Family, ...] = (
    Family(
        "sum",
        ("What is {a} + {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
        _two,
        lambda n: n.a + n.b,
        commutes=True,
    ),
    Family(
        "difference",
        ("What is {a} - {b}?", "How much more is {a} than {b}?"),
        _two,
        lambda n: n.a - n.b,
    ),
    Family(
        "product",
        ("What is {a} * {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
        _large_and_small,
        lambda n: n.a * n.b,
        commutes=True,
    ),
    Family(
        "remainder",
        ("What is {a} mod {b}?", "What remains when {a} is divided by {b}?"),
        _division,
        lambda n: n.a % n.b,
    ),
    Family(
        "quotient",
        ("Divide {a} by {b} and round down.", "How often can {a} lose {b}?"),
        _division,
        lambda n: n.a // n.b,
    ),
    Family(
        "gcd",
        ("What is the gcd of {a} and {b}?", "Find the greatest common divisor of {a} and {b}."),
        _common_factor,
        lambda n: math.gcd(n.a, n.b),
        commutes=True,
    ),
    Family(
        "lcm",
        ("What is the lcm of {a} and {b}?", "Find the least common multiple of {a} and {b}."),
        _common_factor,
        lambda n: math.lcm(n.a, n.b),
        commutes=True,
    ),
    Family(
        "power",
        ("What is {a} to the power {b}?", "Raise {a} to the power {b}."),
        _power,
        lambda n: n.a**n.b,
    ),
    Family(
        "range_sum",
        ("Add all integers from {a} to {b}.", "What is the sum of the integers from {a} to {b}?"),
        _interval,
        lambda n: (n.a + n.b) * (n.b - n.a + 1) // 2,
    ),
    Family(
        "odd_sum",
        ("Add the odd numbers up to {a}.", "What is the sum of the odd numbers up to {a}?"),
        _one,
        lambda n: ((n.a + 1) // 2) ** 2,
    ),
    Family(
        "divisors",
        ("How many divisors does {a} have?", "Count the divisors of {a}."),
        _one,
        lambda n: sum(1 for d in range(1, n.a + 1) if n.a % d == 0),
    ),
    Family(
        "primes",
        ("How many primes are there up to {a}?", "Count the primes up to {a}."),
        _one,
        lambda n: _count_primes(n.a),
    ),
    Family(
        "linear",
        ("Solve {a}x + {b} = {c}.", "Find x with {a}x + {b} = {c}."),
        _linear,
        lambda n: (n.c - n.b) // n.a,
    ),
    Family(
        "bags",
        (
            "Ann has {a} bags of {b} apples and eats {c}. How many are left?",
            "There are {a} boxes of {b} pens. {c} pens are lost. How many are left?",
        ),
        _bags,
        lambda n: n.a * n.b - n.c,
        commutes=True,
    ),
    Family(
        "perimeter",
        ("What is the perimeter of a {a} by {b} field?", "A field is {a} by {b}. How long is its fence?"),
        _two,
        lambda n: 2 * (n.a + n.b),
        commutes=True,
    ),
)


def draw_questions(seed: int, split: Split) -> Iterator[Question]:
    """Questions of one split without end: families in turn, numbers and phrasing at random; may repeat."""
    rng = random.Random(f"{seed} {split.value}")

    def draw(family: Family) -> Question:
        difficulty = rng.choice(DIFFICULTIES)
        return Question(family, family.draw(rng, difficulty), rng.randrange(len(family.phrasings)), difficulty)

    while True:
        for family in rng.sample(FAMILIES, len(FAMILIES)):
            question = draw(family)
            while question.split is not split:
                question = draw(family)
            yield question


def generate_problems(seed: int, split: Split | str, count: int) -> list[Problem]:
    """`count` different problems of one split, the families as even as the world allows.

    A shorter list is a prefix of a longer one. Raises ValueError above `MAX_PROBLEMS`.
    """
    if count > MAX_PROBLEMS:
        raise ValueError(f"count: {count} problems are more than a split has; give at most {MAX_PROBLEMS}")
    problems: dict[str, Problem] = {}
    for question in draw_questions(seed, Split(split)):
        if len(problems) >= count:
            break
        problem = question.to_problem()
        problems.setdefault(problem.id, problem)
    return list(problems.values())
