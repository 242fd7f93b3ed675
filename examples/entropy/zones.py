"""Which tokens of a trajectory are marked for their entropy, and in which part of it they stand.

Legend: T sampled tokens of one trajectory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rstar_ray.outcome import Outcome

MARKED_SHARE = 0.2
"""Of each trajectory's sampled tokens, those of the highest entropy (arXiv:2508.20722 section 5.4)."""
REFLECTION_TOKENS = 24
"""How far behind a tool's answer a token counts as reflection on it."""


class Zone(StrEnum):
    """Where a sampled token stands."""

    AFTER_ERROR = "reflection after an error"
    AFTER_RESULT = "reflection after a result"
    CODE = "code"
    PROSE = "prose"  # a marked token here is a forking token: it opens a way of thinking
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One turn as it was sampled: its tokens, those inside a call, and how the calls before it had ended."""

    token_ids: tuple[int, ...]
    in_call: tuple[bool, ...]  # by token
    in_answer: tuple[bool, ...]
    answered: Outcome | None  # of the tool answer right before it, a failed one if there is one; None in the first turn

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.in_call) == len(self.in_answer)


def zones(turns: Sequence[SampledTurn]) -> list[Zone]:
    """[T] the zone of every sampled token."""
    return [zone for turn in turns for zone in _zones_of(turn)]


def _zones_of(turn: SampledTurn) -> Iterator[Zone]:
    after = None if turn.answered is None else Zone.AFTER_ERROR if turn.answered.failed else Zone.AFTER_RESULT
    for place, (in_call, in_answer) in enumerate(zip(turn.in_call, turn.in_answer, strict=True)):
        if in_answer:
            yield Zone.ANSWER
        elif after is not None and place < REFLECTION_TOKENS:
            yield after
        else:
            yield Zone.CODE if in_call else Zone.PROSE


def marked(entropy_T: NDArray[np.float64], share: float = MARKED_SHARE) -> NDArray[np.bool_]:
    """[T] True at the `share` of tokens (rounded up) with the highest entropy; of equal ones the earlier.

    >>> marked(np.array([0.1, 2.0, 0.3, 1.0, 0.0])).tolist()
    [False, True, False, False, False]
    """
    count = int(np.ceil(share * len(entropy_T)))
    chosen = np.zeros(len(entropy_T), dtype=np.bool_)
    chosen[np.argsort(-entropy_T, kind="stable")[:count]] = True
    return chosen


@dataclass(frozen=True, slots=True)
class ZoneCount:
    """One zone over many trajectories."""

    zone: Zone
    tokens: int
    marked: int
    entropy_mean: float  # nats; NaN without a token

    @property
    def density(self) -> float:
        """Share of the zone's tokens that are marked: above `MARKED_SHARE` the policy hesitates here."""
        return self.marked / self.tokens if self.tokens else 0.0


def count_zones(trajectories: Sequence[tuple[Sequence[Zone], NDArray[np.float64]]]) -> list[ZoneCount]:
    """Tokens and marked tokens by zone; each trajectory is its tokens' zones [T] and entropies [T], nats."""
    tokens: Counter[Zone] = Counter()
    hits: Counter[Zone] = Counter()
    nats = dict.fromkeys(Zone, 0.0)
    for zone_T, entropy_T in trajectories:
        chosen = marked(entropy_T)
        for zone, entropy, hit in zip(zone_T, entropy_T.tolist(), chosen.tolist(), strict=True):
            tokens[zone] += 1
            hits[zone] += hit
            nats[zone] += entropy
    return [
        ZoneCount(zone, tokens[zone], hits[zone], nats[zone] / tokens[zone] if tokens[zone] else float("nan"))
        for zone in Zone
    ]
