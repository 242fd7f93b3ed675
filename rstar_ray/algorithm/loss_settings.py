"""What can be chosen about the loss; `rstar_ray.algorithm.loss` has the mathematics."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf


class Normalisation(StrEnum):
    """What a token's loss is divided by."""

    TOKEN = "token"  # all sampled tokens of the update (DAPO, arXiv:2503.14476)
    GROUP = "group"  # its kept group's sampled tokens, then the groups (arXiv:2508.20722 Eq. 6, averaged over prompts)
    SEQUENCE = "sequence"  # its row's sampled tokens, then the rows (GRPO, arXiv:2402.03300 Eq. 3)
    CONSTANT = "constant"  # a constant, then the rows (Dr. GRPO, arXiv:2503.20783)


class Correction(StrEnum):
    """How the gap between the engine's and the learner's probabilities is corrected."""

    NONE = "none"
    TOKEN = "token"  # truncated importance weight of each token
    SEQUENCE = "sequence"  # truncated importance weight of the whole row
    ICEPOP = "icepop"  # the token's importance weight inside a band, 0 outside (arXiv:2510.18855)


def default_correction(engine_dtype: str, learner_dtype: str) -> Correction:
    """Truncated weights by token where engine and learner compute in different precisions, else none."""
    return Correction.NONE if engine_dtype == learner_dtype else Correction.TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss of an RL update. The defaults are arXiv:2508.20722 Eq. 6 but for the normalisation, which is DAPO's."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    normalisation: Normalisation = Normalisation.TOKEN
    constant_tokens: int = 1  # for `constant` (Dr. GRPO): the length every row is divided by
    entropy_coefficient: float = 0.0  # above 0 rewards entropy
    kl_coefficient: float = 0.0
    correction: Correction = Correction.NONE
    correction_cap: float = 2.0
    correction_low: float = 0.5  # lower end of icepop's band
    temperature: float = 1.0  # of the sampling: the policy is the tempered distribution

    def __post_init__(self) -> None:
        for name, kind in (("normalisation", Normalisation), ("correction", Correction)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be one of {', '.join(kind)}, got {getattr(self, name)!r}")
        # Comparisons with NaN are false, so it is refused by each of them.
        rules = (
            ("dual_clip", self.dual_clip is None or 1 < self.dual_clip < inf, "finite and above 1, or None"),
            ("temperature", 0 < self.temperature < inf, "finite and above 0"),
            ("clip_low", 0 <= self.clip_low < 1, "at least 0 and below 1"),
            ("clip_high", 0 <= self.clip_high < inf, "finite and at least 0"),
            ("constant_tokens", 1 <= self.constant_tokens < inf, "finite and at least 1"),
            ("entropy_coefficient", -inf < self.entropy_coefficient < inf, "finite"),
            ("kl_coefficient", 0 <= self.kl_coefficient < inf, "finite and at least 0"),
            ("correction_cap", 0 < self.correction_cap < inf, "finite and above 0"),
            ("correction_low", 0 <= self.correction_low <= self.correction_cap, "between 0 and correction_cap"),
        )
        for name, holds, meaning in rules:
            if not holds:
                raise ValueError(f"{name} must be {meaning}, got {getattr(self, name)}")
