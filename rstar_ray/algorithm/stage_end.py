"""When a stage has taught what it can: the paper's reasons to go on to the next (arXiv:2508.20722 section 4.3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Until = Literal["steps", "settled", "solved"]
"""Fixed steps; or the paper's ends of stage 1 and of stage 2."""

WINDOW = 10
"""Steps that are looked at together, and compared with as many before them."""
REMEMBERED = 2 * WINDOW
"""Steps that a decision needs."""
TRUNCATED = 0.10
"""Share of truncated rollouts near which stage 1 settles."""
NEAR = 0.05
"""How far from it is still near."""
STEADY = 0.02
"""Largest change between the windows of a share that has settled, and of a reward on a plateau."""
ALL_RIGHT = 0.70
"""Share of a batch's problems whose rollouts are all right, at which stage 2 ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSigns:
    """What of a step the decision reads; shares are of all its rollouts or groups, before resampling."""

    reward_mean: float
    share_truncated: float
    share_all_right: float  # of groups


def reached(until: Until, signs: Sequence[StepSigns]) -> str:
    """Why a stage with these steps behind it (the latest last) has reached its end; empty where it has not.

    >>> reached("solved", [StepSigns(reward_mean=0.9, share_truncated=0.0, share_all_right=0.75)] * WINDOW)
    '75 % of the problems are all right, over 10 steps'
    """
    if until == "steps" or len(signs) < WINDOW:
        return ""
    late = signs[-WINDOW:]
    if until == "solved":
        solved = _mean(late, _all_right)
        return f"{100 * solved:.0f} % of the problems are all right, over {WINDOW} steps" if solved > ALL_RIGHT else ""
    early = signs[-2 * WINDOW : -WINDOW]
    if len(early) < WINDOW:
        return ""
    cut, reward = _mean(late, _truncated), _mean(late, _reward)
    settled = abs(cut - TRUNCATED) <= NEAR and abs(cut - _mean(early, _truncated)) <= STEADY
    if not settled or reward - _mean(early, _reward) > STEADY:
        return ""
    return f"truncation has settled at {100 * cut:.0f} % and the reward at {reward:.2f}, over {WINDOW} steps"


def _truncated(signs: StepSigns) -> float:
    return signs.share_truncated


def _reward(signs: StepSigns) -> float:
    return signs.reward_mean


def _all_right(signs: StepSigns) -> float:
    return signs.share_all_right


def _mean(signs: Sequence[StepSigns], figure: Callable[[StepSigns], float]) -> float:
    return sum(map(figure, signs)) / len(signs)
