"""Early ends of a stage: the paper's criteria for stages 1 and 2 (arXiv:2508.20722 section 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

from rstar_ray.config.run import Until

WINDOW = 10
"""Steps that `solved` and the report's health checks average over."""
SETTLED_WINDOW = 20
"""Steps that `settled` averages over, and compares with as many earlier steps."""
REMEMBERED = 2 * SETTLED_WINDOW
"""Most steps that a decision needs."""
SETTLED_AFTER = 60
"""Steps after the warm-up before which `settled` never ends a stage: rewards move little while the rate is low."""
TRUNCATED = 0.10
"""Share of truncated rollouts near which stage 1 settles."""
NEAR = 0.05
"""Largest distance from `TRUNCATED` that still counts as near."""
STEADY = 0.02
"""Largest change of the mean truncated share, and of the mean reward, between the two windows."""
ALL_CORRECT = 0.70
"""Share of a batch's problems whose rollouts are all right, above which stage 2 ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSigns:
    """The values of one step that the decision reads; shares are over all its rollouts or groups, before resampling."""

    reward_mean: float
    frac_truncated: float
    frac_all_correct: float  # of groups


def reached(until: Until, signs: Sequence[StepSigns], *, steps_since_warmup: int) -> str:
    """Why the stage ends after the latest of these steps (oldest first); empty if it continues.

    `signs` holds at least the last `REMEMBERED` steps, or all steps of a shorter stage.

    >>> solved = StepSigns(reward_mean=0.9, frac_truncated=0.0, frac_all_correct=0.75)
    >>> reached("solved", [solved] * WINDOW, steps_since_warmup=0)
    '75 % of the problems are all right, over 10 steps'
    """
    if until == "solved":
        return _solved(signs)
    if until == "settled" and steps_since_warmup >= SETTLED_AFTER:
        return _settled(signs)
    return ""


def _solved(signs: Sequence[StepSigns]) -> str:
    if len(signs) < WINDOW:
        return ""
    share = _mean([step.frac_all_correct for step in signs[-WINDOW:]])
    return f"{100 * share:.0f} % of the problems are all right, over {WINDOW} steps" if share > ALL_CORRECT else ""


def _settled(signs: Sequence[StepSigns]) -> str:
    if len(signs) < REMEMBERED:
        return ""
    early, late = signs[-REMEMBERED:-SETTLED_WINDOW], signs[-SETTLED_WINDOW:]
    truncated = _mean([step.frac_truncated for step in late])
    reward = _mean([step.reward_mean for step in late])
    truncated_change = truncated - _mean([step.frac_truncated for step in early])
    reward_change = reward - _mean([step.reward_mean for step in early])
    if abs(truncated - TRUNCATED) > NEAR or max(abs(truncated_change), abs(reward_change)) > STEADY:
        return ""
    return (
        f"truncation has settled at {100 * truncated:.0f} % and the reward at {reward:.2f}, over {SETTLED_WINDOW} steps"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
