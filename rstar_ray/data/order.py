"""What a step draws from its data: each item once per epoch, in an order fixed by the seed."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rstar_ray.algorithm.update import SftExample
from rstar_ray.seeds import named_generator
from rstar_ray.trajectory import Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a stage's draw stands; saved with every checkpoint."""

    epoch: int = 0
    drawn: int = 0  # items of this epoch already drawn or skipped
    solved: tuple[tuple[int, tuple[str, ...]], ...] = ()  # of the latest steps, the problems solved by all rollouts

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "DataPosition":
        solved = tuple((step, tuple(names)) for step, names in saved.get("solved", ()))
        return cls(saved["epoch"], saved["drawn"], solved)


def draw(
    items: Sequence[T],
    count: int,
    position: DataPosition,
    *,
    seed: int,
    stage: str,
    skipped: Collection[int] = frozenset(),
) -> tuple[list[T], DataPosition]:
    """The next `count` items and where the draw then stands; an epoch's order depends only on its name.

    `skipped`: indices of items that are left out. Raises ValueError where there is nothing to draw from.
    """
    if len(skipped) >= len(items):
        raise ValueError(f"{stage}: there is nothing to draw from")
    drawn: list[T] = []
    epoch, place = position.epoch, position.drawn
    while len(drawn) < count:
        if place >= len(items):
            epoch, place = epoch + 1, 0
        order = named_generator(seed, stage, "order", epoch).permutation(len(items))
        while place < len(items) and len(drawn) < count:
            index = int(order[place])
            place += 1
            if index not in skipped:
                drawn.append(items[index])
    return drawn, replace(position, epoch=epoch, drawn=place)


def digest_of_problems(problems: Iterable[Problem]) -> str:
    """Which are drawn from, and in which order they stand: a position among others would be one among nothing."""
    return _digest(json.dumps(problem.as_row()) for problem in problems)


def digest_of_rows(rows: Iterable[SftExample], source: str = "") -> str:
    """As `digest_of_problems`, of conversations by their names and the digest of their file.

    Not of their tokens: a template may write the day's date.
    """
    return _digest([source, *(row.name for row in rows)])


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()
