"""From published problem sets to training problems (arXiv:2508.20722 section 4.2), counted by reason.

What is dropped: rows without problem or answer, in another language or with another answer than an integer where
that is asked for, exact and near duplicates, problems that share 8 words in a row with an evaluation set, and, where a
policy's results are given, problems solved too rarely or too often.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations

from rstar_ray.data.columns import MATHEMATICS, RawProblem
from rstar_ray.data.overlap import NGRAM_WORDS, near_duplicates, numbers_of, shared_with, tokens
from rstar_ray.reward.find import as_integer
from rstar_ray.reward.maths import decide, number, spelled
from rstar_ray.trajectory import Problem

_OTHER_SCRIPTS = re.compile(r"[\u0400-\u06ff\u0900-\u0dff\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_MAY_BE_A_NUMBER = re.compile(
    r"(?=.*\d)(?:[\d\s.,/+\-{}^*()!]|\\(?:[dt]?frac|times|cdot|text|mathrm|left|right|[,;! ])){1,60}", re.DOTALL
)
"""Cheap test that selects answers for the expensive comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRates:
    """Pass counts by problem id, and the bounds between which a problem is kept (inclusive)."""

    solved: Mapping[str, int]  # by problem id
    at_least: int
    at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is dropped."""

    integer_answers: bool = False
    english: bool = False
    max_chars: int = 0  # longest problem kept [characters]; 0 keeps all
    duplicates: bool = True  # exact and near ones
    against: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])  # evaluation sets by name
    ngram_words: int = NGRAM_WORDS
    pass_rates: PassRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The remaining problems, and the counts of dropped ones."""

    problems: list[Problem]
    read: int
    dropped: dict[str, int]  # by reason, in the order of the checks

    def __post_init__(self) -> None:
        assert self.read == len(self.problems) + sum(self.dropped.values()), "a row was lost"


def prepare(rows: Iterable[RawProblem], rules: Rules, *, name: str) -> Prepared:
    """Check every row; `name` begins the ids of rows without an id. Of duplicates the first stays."""
    dropped: Counter[str] = Counter()
    kept: list[RawProblem] = []
    read = 0
    for read, row in enumerate(rows, start=1):
        reason = _refusal(row, rules)
        if reason:
            dropped[reason] += 1
        else:
            kept.append(row if row.id else replace(row, id=f"{name}-{read}"))
    if rules.duplicates:
        kept = _without_duplicates(kept, dropped)
    if rules.against:
        shared = shared_with([row.problem for row in kept], rules.against, size=rules.ngram_words)
        dropped.update(f"shares {rules.ngram_words} words in a row with {name}" for name in shared if name)
        kept = [row for row, name in zip(kept, shared, strict=True) if not name]
    kept = _with_own_ids(kept)
    if rules.pass_rates is not None:
        kept = _between(kept, rules.pass_rates, dropped)
    return Prepared(
        problems=[_problem(row, rules) for row in kept],
        read=read,
        dropped={reason: count for reason, count in dropped.items() if count},
    )


def _refusal(row: RawProblem, rules: Rules) -> str:
    """Why a row by itself cannot be used; empty where it can."""
    if not row.problem.strip():
        return "no problem text"
    if not row.answer.strip():
        return "no answer"
    if rules.max_chars and len(row.problem) > rules.max_chars:
        return f"longer than {rules.max_chars} characters"
    if rules.english and _OTHER_SCRIPTS.search(row.problem):
        return "not English"
    if rules.integer_answers and row.reward in MATHEMATICS and as_integer(row.answer.strip("$ ")) is None:
        return "answer is not an integer"
    return ""


def _problem(row: RawProblem, rules: Rules) -> Problem:
    answer = row.answer.strip()
    integer = as_integer(answer.strip("$ ")) if rules.integer_answers and row.reward in MATHEMATICS else None
    return Problem(
        id=row.id,
        problem=row.problem,
        answer=answer if integer is None else str(integer),
        family=row.family,
        difficulty=row.difficulty,
        reward=row.reward,
        metadata=row.metadata,
        environment=row.environment,
    )


def _without_duplicates(rows: Sequence[RawProblem], dropped: Counter[str]) -> list[RawProblem]:
    """The first of each problem; none of those with contradicting answers, since one of these is wrong."""
    texts = [tokens(row.problem) for row in rows]
    meant = [_meant(row) for row in rows]
    answers: dict[tuple[str, ...], dict[Fraction | str, RawProblem]] = {}
    for text, answer, row in zip(texts, meant, rows, strict=True):
        answers.setdefault(tuple(text), {}).setdefault(answer, row)
    contested = {key for key, found in answers.items() if len(found) > 1 and not _same_answers(list(found.values()))}
    once: list[int] = []
    seen: set[tuple[str, ...]] = set()
    for index, text in enumerate(texts):
        key = tuple(text)
        if key in contested:
            dropped["asked twice with different answers"] += 1
        elif key in seen:
            dropped["exact duplicate"] += 1
        else:
            seen.add(key)
            once.append(index)
    split = [texts[index] for index in once]
    groups = [(numbers_of(text), meant[index]) for text, index in zip(split, once, strict=True)]
    first = near_duplicates(split, groups)
    kept = [index for position, index in enumerate(once) if first[position] == position]
    dropped["near duplicate"] += len(once) - len(kept)
    return [rows[index] for index in kept]


def _meant(row: RawProblem) -> Fraction | str:
    """A cheap key that equal answers share: the number where it is one, else its words."""
    if row.reward in MATHEMATICS:
        text = row.answer.strip("$ \n")
        integer = as_integer(text)
        if integer is not None:
            return Fraction(integer)
        value = number(text)
        if value is None and _MAY_BE_A_NUMBER.fullmatch(text):
            value_text, unit = spelled(text)
            value = None if unit else number(value_text)
        if value is not None:
            return value
    return " ".join(tokens(row.answer))


def _same_answers(rows: Sequence[RawProblem]) -> bool:
    """Whether all are equal without computer algebra, which would be too slow here."""
    if any(row.reward not in MATHEMATICS for row in rows):
        return False
    return all(decide(one.answer, other.answer) is True for one, other in combinations(rows, 2))


def _with_own_ids(rows: Sequence[RawProblem]) -> list[RawProblem]:
    """Make ids unique: different problems with one id (two sets that both count from 0) get a number appended."""
    taken = Counter(row.id for row in rows)
    used: set[str] = set()
    found: list[RawProblem] = []
    for row in rows:
        name, number = row.id, 1
        while name in used or (number > 1 and name in taken):
            number += 1
            name = f"{row.id}.{number}"
        used.add(name)
        found.append(row if name == row.id else replace(row, id=name))
    return found


def _between(rows: Sequence[RawProblem], rates: PassRates, dropped: Counter[str]) -> list[RawProblem]:
    kept: list[RawProblem] = []
    for row in rows:
        solved = rates.solved.get(row.id)
        if solved is None:
            dropped["no result in the pass rates"] += 1
        elif solved < rates.at_least:
            dropped[f"solved fewer than {rates.at_least} times"] += 1
        elif solved > rates.at_most:
            dropped[f"solved more than {rates.at_most} times"] += 1
        else:
            kept.append(row)
    return kept
