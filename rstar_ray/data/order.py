"""The items that a step draws from its data: each once per epoch, in an order fixed by the seed."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rstar_ray.algorithm.update import SftExample
from rstar_ray.seeds import named_generator
from rstar_ray.trajectory import Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataPosition:
    """The position of a stage's draw; saved with every checkpoint."""

    epoch: int = 0
    drawn: int = 0  # items of this epoch already drawn or skipped
    # of the latest steps with --data.skip-solved: the problems that all rollouts solved, and the others that were drawn
    visits: tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...] = ()
    sources: tuple[tuple[str, int, int], ...] = ()  # with a mix: (source, its epoch, drawn) of each

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "DataPosition":
        before = [(step, names, ()) for step, names in saved.get("solved", ())]  # as earlier versions wrote them
        visits = tuple((step, tuple(solved), tuple(others)) for step, solved, others in saved.get("visits", before))
        sources = tuple((str(name), epoch, drawn) for name, epoch, drawn in saved.get("sources", ()))
        return cls(saved["epoch"], saved["drawn"], visits, sources)


def draw(
    items: Sequence[T],
    count: int,
    position: DataPosition,
    *,
    seed: int,
    stage: str,
    skipped: Collection[int] = frozenset(),
) -> tuple[list[T], DataPosition]:
    """The next `count` items, and the position after them; an epoch's order depends only on its name.

    `skipped`: indices of excluded items. Raises ValueError where no item is left.
    """
    if len(skipped) >= len(items) and count:
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


def mix_counts(weights: Mapping[str, float], count: int, rng: np.random.Generator, *, floor: int = 0) -> dict[str, int]:
    """How many of `count` items each source has: `floor`, and a share of the others.

    Systematic sampling: a share is rounded up or down, by one random number for all, so that its expectation is exact.
    """
    floor = min(floor, count // len(weights))
    exact = np.cumsum(list(weights.values())) / sum(weights.values()) * (count - floor * len(weights))
    ends = np.floor(exact + rng.random()).astype(int)
    ends[-1] = count - floor * len(weights)  # whatever the rounding
    shares = np.diff(ends, prepend=0)
    return {name: floor + int(share) for name, share in zip(weights, shares, strict=True)}


def draw_mix(
    problems: Sequence[Problem],
    counts: Mapping[str, int],
    position: DataPosition,
    *,
    seed: int,
    stage: str,
    skipped: Collection[int] = frozenset(),
) -> tuple[list[Problem], DataPosition]:
    """Like `draw`, so many from each source (the problems of one family), each with a separate order."""
    drawn: list[Problem] = []
    places = {name: (epoch, place) for name, epoch, place in position.sources}
    for source, count in counts.items():
        indices = [index for index, problem in enumerate(problems) if problem.family == source]
        found, reached = draw(
            [problems[index] for index in indices],
            count,
            DataPosition(*places.get(source, (0, 0))),
            seed=seed,
            stage=f"{stage}/{source}",
            skipped={place for place, index in enumerate(indices) if index in skipped},
        )
        drawn += found
        places[source] = (reached.epoch, reached.drawn)
    sources = tuple((name, epoch, place) for name, (epoch, place) in places.items())
    return drawn, replace(position, sources=sources)


def present(weights: Mapping[str, float], problems: Iterable[Problem]) -> dict[str, float]:
    """The sources of a mix that have at least one problem."""
    families = {problem.family for problem in problems}
    return {source: weight for source, weight in weights.items() if source in families}


def digest_of_problems(problems: Iterable[Problem]) -> str:
    """A digest of the drawn items and their order: a position is meaningless in another list."""
    return _digest(json.dumps(problem.as_row()) for problem in problems)


def digest_of_rows(rows: Iterable[SftExample], source: str = "") -> str:
    """Like `digest_of_problems`, for conversations, by their names and the digest of their file.

    Tokens are not included: a template may write the date.
    """
    return _digest([source, *(row.name for row in rows)])


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()
