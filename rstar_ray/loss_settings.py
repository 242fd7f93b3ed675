"""What can be chosen about the loss; `rstar_ray.loss` has the mathematics."""

from dataclasses import dataclass
from enum import StrEnum


class Normalisation(StrEnum):
    """What a token's loss is divided by."""

    TOKEN = "token"  # all sampled tokens of the update (arXiv:2508.20722 Eq. 6; DAPO, arXiv:2503.14476)
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
    """The loss of an RL update. The defaults are arXiv:2508.20722 Eq. 6: no KL term, no entropy bonus."""

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
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
