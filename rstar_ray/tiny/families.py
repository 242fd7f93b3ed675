"""The families of the tiny world's questions: phrasings, numbers and answers.

Answers are computed independently of the code that a policy sees.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

SIZES = (1, 2, 3)
"""Size classes of a question's numbers, small to large."""


class Numbers(NamedTuple):
    """The numbers of a question; unused ones are 0."""

    a: int
    b: int = 0
    c: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of question.

    `phrasings` contain `{a}`, `{b}`, `{c}`; `draw(rng, size)` returns the numbers; `answer` computes the truth. A
    family commutes if a and b are interchangeable. `results`: number of intermediate results, one call each.
    """

    name: str
    phrasings: tuple[str, ...]
    draw: Callable[[random.Random, int], Numbers]
    answer: Callable[[Numbers], int]
    commutes: bool = False
    results: int = 1


def _number(rng: random.Random, size: int) -> int:
    """Two digits from the second size on."""
    low, high = ((3, 20), (11, 60), (21, 99))[size - 1]
    return rng.randint(low, high)


def _small(rng: random.Random, size: int) -> int:
    """A second number, smaller than most first numbers."""
    low, high = ((2, 9), (3, 12), (11, 25))[size - 1]
    return rng.randint(low, high)


def _two(rng: random.Random, size: int) -> Numbers:
    return Numbers(_number(rng, size), _number(rng, size))


def _large_and_small(rng: random.Random, size: int) -> Numbers:
    return Numbers(_number(rng, size), _small(rng, size))


def _division(rng: random.Random, size: int) -> Numbers:
    """Numbers whose quotient and remainder differ, so that neither is accepted for the other."""
    numbers = _large_and_small(rng, size)
    while numbers.a // numbers.b == numbers.a % numbers.b:
        numbers = _large_and_small(rng, size)
    return numbers


def _common_factor(rng: random.Random, size: int) -> Numbers:
    factor = rng.randint(2, (4, 9, 15)[size - 1])
    top = (5, 8, 16)[size - 1]
    first, second = rng.sample(range(2, top + 1), 2)
    return Numbers(factor * first, factor * second)


def _power(rng: random.Random, size: int) -> Numbers:
    """Powers of at most five digits."""
    base, exponent = (((2, 9), (3, 5)), ((10, 17), (3, 4)), ((18, 46), (3, 3)))[size - 1]
    return Numbers(rng.randint(*base), rng.randint(*exponent))


def _interval(rng: random.Random, size: int) -> Numbers:
    first = _small(rng, size)
    return Numbers(first, first + _number(rng, min(size, 2)))


def _one(rng: random.Random, size: int) -> Numbers:
    """A single number may have three digits; a quadratic search still counts up to it at once."""
    return Numbers(rng.randint(*((5, 40), (41, 99), (100, 300))[size - 1]))


def _linear(rng: random.Random, size: int) -> Numbers:
    """a * x + b = c with a whole x and b >= a, so that a sign slip changes the answer."""
    slope = _small(rng, min(size, 2))
    offset = slope + rng.randint(0, (9, 30, 60)[size - 1])
    return Numbers(slope, offset, slope * _small(rng, size) + offset)


def _bags(rng: random.Random, size: int) -> Numbers:
    bags, each = _small(rng, size), _small(rng, size)
    return Numbers(bags, each, rng.randint(1, bags * each - 1))


def _rest_above_two(rng: random.Random, size: int) -> Numbers:
    """A remainder whose square is not its double."""
    numbers = _large_and_small(rng, size)
    while numbers.a % numbers.b <= 2:
        numbers = _large_and_small(rng, size)
    return numbers


def _two_small(rng: random.Random, size: int) -> Numbers:
    return Numbers(_small(rng, size), _small(rng, size))


def _three(rng: random.Random, size: int) -> Numbers:
    """Two to add or multiply, and a third that their result is divided by or multiplied with."""
    return Numbers(_small(rng, size), _small(rng, size), rng.randint(3, 9))


def _three_falling(rng: random.Random, size: int) -> Numbers:
    """The first is above the second."""
    least = _small(rng, size)
    return Numbers(least + _small(rng, size), least, rng.randint(3, 9))


def _multiples_and_more(rng: random.Random, size: int) -> Numbers:
    """Two with a small common multiple, and a number to add to it."""
    first, second, _ = _common_factor(rng, min(size, 2))
    return Numbers(first, second, rng.randint(3, 9))


def _product_chain(rng: random.Random, size: int) -> Numbers:
    """A product whose remainder's square is not its double."""
    numbers = _three(rng, size)
    while numbers.a * numbers.b % numbers.c <= 2:
        numbers = _three(rng, size)
    return numbers


def _digit_sum(number: int) -> int:
    rest, total = abs(number), 0
    while rest:
        rest, digit = divmod(rest, 10)
        total += digit
    return total


def _count_divisors(number: int) -> int:
    return sum(1 for d in range(1, number + 1) if number % d == 0)


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
        lambda n: _count_divisors(n.a),
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
    Family(
        "next_multiple",
        ("What is the next multiple of {b} after {a}?", "Find the smallest multiple of {b} above {a}."),
        _large_and_small,
        lambda n: n.a + n.b - n.a % n.b,
    ),
    Family(
        "rest_squared",
        ("Square {a} mod {b}.", "What is {a} mod {b}, squared?"),
        _rest_above_two,
        lambda n: (n.a % n.b) ** 2,
        results=2,
    ),
    Family(
        "gcd_and_lcm",
        ("Add the gcd and the lcm of {a} and {b}.", "What is the sum of the gcd and the lcm of {a} and {b}?"),
        _common_factor,
        lambda n: math.gcd(n.a, n.b) + math.lcm(n.a, n.b),
        commutes=True,
        results=2,
    ),
    Family(
        "product_digits",
        ("Add the digits of {a} * {b}.", "What is the sum of the digits of {a} * {b}?"),
        _large_and_small,
        lambda n: _digit_sum(n.a * n.b),
        commutes=True,
        results=2,
    ),
    Family(
        "product_divisors",
        ("How many divisors does {a} * {b} have?", "Count the divisors of {a} * {b}."),
        _two_small,
        lambda n: _count_divisors(n.a * n.b),
        commutes=True,
        results=2,
    ),
    Family(
        "shared_bags",
        (
            "Ann shares {a} bags of {b} apples among {c} friends. How many are left?",
            "{a} boxes of {b} pens are shared by {c} children. How many pens are left?",
        ),
        _product_chain,
        lambda n: n.a * n.b % n.c,
        commutes=True,
        results=2,
    ),
    Family(
        "sum_quotient",
        ("Add {a} and {b}, divide by {c} and round down.", "How often can {a} + {b} lose {c}?"),
        _three,
        lambda n: (n.a + n.b) // n.c,
        commutes=True,
        results=2,
    ),
    Family(
        "product_rest_squared",
        ("Multiply {a} by {b}, take it mod {c} and square that.", "What is {a} * {b} mod {c}, squared?"),
        _product_chain,
        lambda n: (n.a * n.b % n.c) ** 2,
        commutes=True,
        results=3,
    ),
    Family(
        "square_digits",
        ("Add {a} and {b}, square it and add the digits.", "What is the sum of the digits of the square of {a} + {b}?"),
        _two,
        lambda n: _digit_sum((n.a + n.b) ** 2),
        commutes=True,
        results=3,
    ),
    Family(
        "lcm_divisors",
        (
            "Take the lcm of {a} and {b}, add {c} and count the divisors.",
            "How many divisors does the lcm of {a} and {b} have when {c} is added?",
        ),
        _multiples_and_more,
        lambda n: _count_divisors(math.lcm(n.a, n.b) + n.c),
        commutes=True,
        results=3,
    ),
    Family(
        "difference_digits",
        (
            "Take {b} from {a}, multiply by {c} and add the digits.",
            "What is the sum of the digits of {c} times the difference of {a} and {b}?",
        ),
        _three_falling,
        lambda n: _digit_sum((n.a - n.b) * n.c),
        commutes=True,
        results=3,
    ),
)
