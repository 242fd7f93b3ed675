"""What a reward may be: any finite number.

Three readings of a reward are fixed. A reward of 1 or more counts as solved (pass rates, pass@k, the hard set, the end
of a stage); one above 0 is a success for Resample-on-Correct; advantages use the number itself.
"""

import math
from collections.abc import Mapping
from numbers import Real

import numpy as np

SOLVED = 1.0
"""The smallest reward that counts as solved."""


class Scored(float):
    """A reward with the components that a function of the user returned beside it; a `Judgement` has them apart."""

    components: Mapping[str, float]

    def __new__(cls, reward: float, components: Mapping[str, float]) -> "Scored":
        scored = super().__new__(cls, reward)
        scored.components = components
        return scored


def finite(value: object) -> float | None:
    """The number that user code returned as a reward, True and False as 1 and 0; None for anything else.

    >>> finite(-2), finite(np.True_), finite(float("nan")), finite("1")
    (-2.0, 1.0, None, None)
    """
    if not isinstance(value, Real | np.bool_):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
