"""The tiny world's problems: integer answers from one to three results, small numbers, disjoint splits."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rstar_ray.tiny.families import FAMILIES, SIZES, Family, Numbers
from rstar_ray.trajectory import Problem

MAX_PROBLEMS = 10_000
"""The smallest split has more questions, but its small families have fewer."""


class Split(StrEnum):
    """The split of a question, determined by the question alone."""

    SFT = "sft"
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Question:
    """One family with its numbers, in one of its phrasings."""

    family: Family
    numbers: Numbers
    phrasing: int

    @property
    def text(self) -> str:
        return self.family.phrasings[self.phrasing].format(**self.numbers._asdict())

    @property
    def fingerprint(self) -> int:
        """A 64-bit hash of the question, the same for every phrasing."""
        return _fingerprint(self.family, self.numbers)

    @property
    def split(self) -> Split:
        """30 % SFT, 60 % train, 10 % held out; all phrasings and operand orders of a question are in one split."""
        first, second, third = self.numbers
        ordered = Numbers(min(first, second), max(first, second), third) if self.family.commutes else self.numbers
        bucket = _fingerprint(self.family, ordered) % 10
        if bucket == 0:
            return Split.HELD_OUT
        return Split.SFT if bucket <= 3 else Split.TRAIN

    def to_problem(self) -> Problem:
        return Problem(
            id=f"{self.family.name}-{self.fingerprint:016x}-{self.phrasing}",
            problem=self.text,
            answer=str(self.family.answer(self.numbers)),
            family=self.family.name,
            difficulty=float(self.family.results),
        )


def _fingerprint(family: Family, numbers: Numbers) -> int:
    key = f"{family.name} {numbers.a} {numbers.b} {numbers.c}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


_ROUND = [family for family in FAMILIES for _ in range(min(2, family.results))]
"""Families to draw from; those with more than one result are drawn twice as often."""


def draw_questions(seed: int, split: Split) -> Iterator[Question]:
    """Endless questions of one split: families in turn, numbers and phrasing at random; may repeat."""
    rng = random.Random(f"{seed} {split.value}")

    def draw(family: Family) -> Question:
        return Question(family, family.draw(rng, rng.choice(SIZES)), rng.randrange(len(family.phrasings)))

    while True:
        for family in rng.sample(_ROUND, len(_ROUND)):
            question = draw(family)
            while question.split is not split:
                question = draw(family)
            yield question


def generate_problems(seed: int, split: Split | str, count: int) -> list[Problem]:
    """`count` different problems of one split, from the families as evenly as possible.

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
