"""What a learner is told once, when it starts."""

from dataclasses import dataclass, field
from typing import Literal

from actors.weights.buckets import BUCKET_BYTES
from rstar_ray.algorithm.batch_plan import BatchLimits
from rstar_ray.algorithm.loss_settings import LossSettings
from rstar_ray.algorithm.lr_schedule import LrSchedule
from rstar_ray.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """One record for all ranks; plain values only, so that it travels to every actor."""

    model: str  # Hugging Face folder of a causal LM
    world_size: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"  # "cuda" is ROCm's name too
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the forward pass; master weights are float32
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: bool = False  # optimizer state and master weights in host memory
    activation_checkpointing: bool = False
    attention: Literal["rows", "sdpa", "flash_attention_2"] = "rows"  # "sdpa" pads, the others pack rows end to end
    num_threads: int = 1  # CPU threads of a rank
    seed: int = 0

    schedule: LrSchedule = field(default_factory=LrSchedule)
    weight_decay: float = 0.0  # not applied to norms and biases
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    grad_clip: float = 1.0  # largest global gradient norm; 0 clips nothing

    loss: LossSettings = field(default_factory=LossSettings)
    batch: BatchLimits = field(default_factory=BatchLimits)
    logprob_chunk_tokens: int = 4_096  # tokens whose logits exist at one time
    updates_per_step: int = 1  # optimizer steps one train_rl call is split into
    check_old_logprobs_every: int = 0  # calls between those that compute old_logprobs apart; 0 never
    reference_model: str = ""  # folder of the policy a KL term is taken to; needed where kl_coefficient is above 0

    max_bad_updates: int = 3  # not finite, in a row, before the run stops
    inspect_dir: str = ""  # where batches of updates that were not finite are saved; empty saves none
    bucket_bytes: int = BUCKET_BYTES
    start_deadline_s: float = 900.0
    step_deadline_s: float = 1_800.0  # of an update, a publish, a checkpoint

    @property
    def packed(self) -> bool:
        """Whether the rows of a micro batch lie end to end, without padding."""
        return self.attention != "sdpa"

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError("learner.world_size", f"{self.world_size} ranks", "give at least 1")
        if self.loss.kl_coefficient and not self.reference_model:
            raise ConfigError("learner.reference_model", "a KL term without a reference", "name a model folder")
        if self.dtype == "bfloat16" and self.zero_stage == 0:
            raise ConfigError(
                "learner.zero_stage", "bfloat16 without ZeRO has no float32 master weights", "give 1 to 3"
            )
        if self.offload and self.zero_stage == 0:
            raise ConfigError("learner.offload", "needs ZeRO", "give learner.zero_stage 1 to 3")
        if self.updates_per_step < 1:
            raise ConfigError("learner.updates_per_step", f"{self.updates_per_step}", "give at least 1")
