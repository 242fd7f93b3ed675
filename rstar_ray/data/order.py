"""What a step draws from its data: each item once per epoch, in an order fixed by the seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rstar_ray.seeds import named_generator

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a stage's draw stands; saved with every checkpoint."""

    epoch: int = 0
    drawn: int = 0  # items of this epoch already drawn


def draw(
    items: Sequence[T], count: int, position: DataPosition, *, seed: int, stage: str
) -> tuple[list[T], DataPosition]:
    """The next `count` items and where the draw then stands; an epoch's order depends only on its name.

    Raises ValueError where there is nothing to draw from.
    """
    if not items:
        raise ValueError(f"{stage}: there is nothing to draw from")
    drawn: list[T] = []
    epoch, start = position.epoch, position.drawn
    while len(drawn) < count:
        if start >= len(items):
            epoch, start = epoch + 1, 0
        order = named_generator(seed, stage, "order", epoch).permutation(len(items))
        taken = order[start : start + count - len(drawn)]
        drawn += [items[int(i)] for i in taken]
        start += len(taken)
    return drawn, DataPosition(epoch, start)
