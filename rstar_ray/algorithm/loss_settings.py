"""What can be chosen about the loss; `rstar_ray.algorithm.loss` has the mathematics."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from rstar_ray.config import RunConfig


class Normalisation(StrEnum):
    """What a token's loss is divided by."""

    TOKEN = "token"  # all sampled tokens of the update (DAPO, arXiv:2503.14476)
    GROUP = "group"  # its kept group's sampled tokens, then the groups (arXiv:2508.20722 Eq. 6, averaged over prompts)
    SEQUENCE = "sequence"  # its row's sampled tokens, then the rows (GRPO, arXiv:2402.03300 Eq. 3)
    CONSTANT = "constant"  # a constant, then the rows (Dr. GRPO, arXiv:2503.20783)


class Correction(StrEnum):
    """How the loss corrects for tokens that the engine's probabilities sampled and the learner's are trained on."""

    NONE = "none"
    TOKEN = "token"  # truncated importance weight of each token
    SEQUENCE = "sequence"  # truncated importance weight of the whole row
    ICEPOP = "icepop"  # the token's importance weight inside a band, 0 outside (arXiv:2510.18855)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss of an RL update; `loss_settings` makes it."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    normalisation: Normalisation
    constant_tokens: int  # for `constant` (Dr. GRPO): the length every row is divided by
    entropy_coefficient: float  # above 0 rewards entropy
    kl_coefficient: float
    correction: Correction
    correction_cap: float  # largest weight under token and sequence
    correction_low: float  # icepop's band
    correction_high: float
    temperature: float  # of the sampling: the policy is the tempered distribution

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
            ("correction_high", 0 < self.correction_high < inf, "finite and above 0"),
            ("correction_low", 0 <= self.correction_low <= self.correction_high, "between 0 and correction_high"),
        )
        for name, holds, meaning in rules:
            if not holds:
                raise ValueError(f"{name} must be {meaning}, got {getattr(self, name)}")


def loss_settings(config: RunConfig) -> LossSettings:
    """The loss of a run's updates: arXiv:2508.20722 Eq. 6 by default, but for the normalisation, which is DAPO's."""
    algorithm = config.algorithm
    return LossSettings(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip or None,
        normalisation=Normalisation(algorithm.normalisation),
        constant_tokens=config.engine.max_context_tokens,  # one constant for all stages
        entropy_coefficient=algorithm.entropy_coefficient,
        kl_coefficient=algorithm.kl_coefficient,
        correction=Correction(config.correction),
        correction_cap=algorithm.correction_cap,
        correction_low=algorithm.correction_low,
        correction_high=algorithm.correction_high,
        temperature=config.rollout.temperature or 1.0,  # greedy rollouts have no distribution but the model's own
    )
